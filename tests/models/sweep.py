"""An update of a tiny model of each causal language model class of transformers, compared with rows alone.

    make test-models [FAMILIES="llama qwen3"]

Windows, chunks and top-k are 4 and 16, rows have up to 60 tokens. The oracle is another model of the same seed, which
the trainer never sees: plain transformers reads each row alone, without padding. Results are appended to a file; what
is in it does not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.models.packing import PACKS, packs_rows
from rlhf_ppo.models.policy_and_value import response_logprobs, response_values
from rlhf_ppo.models.unwrapping import backbone
from tests.conftest import QUIET, make_tokenizer
from tests.models.architectures import families, tiny_model
from tests.runs import record_rollouts

LENGTHS = 45, 3, 22, 9, 45, 1, 30, 17
ROWS = [[(5 * at + 7 * row + at * at // 3) % 43 + 3 for at in range(size)] for row, size in enumerate(LENGTHS)]
ROWS[4][:27], ROWS[6][:20], ROWS[7] = ROWS[0][:27], ROWS[0][:20], ROWS[0][:17]  # longer than all windows
TOLERANCE, WINDOWS = 1e-4, (4, 16)
LORA = LoraConfig(r=4, target_modules="all-linear")
WAYS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "continuous": {"generation_engine": "continuous"},
    "lora": {"peft_config": LORA, "share_base_model": True},
}
WITH_LORA = (
    "llama gemma2 gemma3_text qwen2 qwen2_moe qwen3 qwen3_moe mistral mixtral phi phi3 phimoe olmo2 olmoe cohere2 "
    "granite granitemoehybrid gpt2 gpt_neox gptj opt bloom stablelm smollm3 glm4 deepseek_v3 ernie4_5 olmo3 "
    "gpt_oss lfm2"
).split()


def check_close(what: str, actual: Tensor, expected: Tensor) -> None:
    error = float((actual - expected).abs().max())
    assert error <= TOLERANCE * max(1.0, float(expected.abs().max())), f"{what} are {error:.2g} off"


@torch.no_grad()
def alone(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of a row alone, and the last hidden states."""
    found: list[Tensor] = []
    head = getattr(model, "lm_head", model.get_output_embeddings())  # of ModernBERT with the layer before it
    hook = head.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    hook.remove()
    config = model.config.get_text_config()  # the heads of Inkling and MiniCPM3 read them divided
    name = "logits_scaling" if config.model_type == "minicpm3" else "logits_mup_width_multiplier"
    return logits, found[0][0].float() * (getattr(config, name, None) or 1.0)


def a_stop_token(model: Any) -> int:
    """A token that ends some of the rows early."""
    counts: Counter[int] = Counter()
    for row in ROWS[1:4]:
        ids = list(row)
        for _ in range(6):
            ids.append(int(alone(model, torch.tensor(ids))[0][-1].argmax()))
        counts.update(set(ids[len(row) + 2 :]))
    return min(counts, key=lambda token: (abs(counts[token] - 1.5), token))


def plain(family: str, window: int, trained: Any) -> Any:
    """The model with which `trained` began, with the adapter that it has now, in plain transformers and PEFT."""
    model = tiny_model(family, window=window, eos_token_id=5, pad_token_id=46)
    if isinstance(trained, PeftModel):
        model = get_peft_model(model, copy.deepcopy(LORA))
        weights = get_peft_model_state_dict(trained, adapter_name=str(trained.active_adapter))
        set_peft_model_state_dict(model, {name: value for name, value in weights.items() if ".lora_" in name})
        model = model.merge_and_unload()
    return model


def check_rows_alone(rollout: Rollout, policy: Any, critic: Any, head: Tensor | None, temperature: float) -> None:
    """Each row's tokens, log-probabilities and values are those of the row alone."""
    for row, real in enumerate(rollout.responses.attention_mask):
        ids, length = rollout.responses.query_responses[row, real], int(rollout.response_mask[row].sum())
        logits, new = alone(policy, ids)[0][-length - 1 : -1], ids[-length:, None]
        check_close(f"the likeliest tokens of row {row}", logits.gather(1, new)[:, 0], logits.max(dim=1).values)
        expected = (logits / temperature).log_softmax(-1).gather(1, new)[:, 0]
        check_close(f"log-probabilities of row {row}", rollout.logprobs[row, :length], expected)
        if head is not None:
            values = alone(critic, ids)[1][-length - 1 : -1] @ head
            check_close(f"values of row {row}", rollout.values[row, :length], values)


@torch.no_grad()
def check_padded(models: Any, rollout: Rollout, temperature: float) -> None:
    """One pass over all rows, padded, gives what the rollout has."""
    batch = rollout.responses.batch
    for model in (models.policy, models.value_model):
        setattr(backbone(model), PACKS, "")
    check_close("padded", response_logprobs(models.policy, *batch, temperature).logprobs, rollout.logprobs)
    check_close("padded values", response_values(models.value_model, *batch).values, rollout.values)


def check_family(family: str, window: int, folder: str, value_model: Any = None, **changes: Any) -> str:
    """Take an update with a tiny model and compare; return whether rows were packed."""
    policy = tiny_model(family, window=window, eos_token_id=5, pad_token_id=46)
    try:
        stop = a_stop_token(policy)
    except (RuntimeError, IndexError):  # the trainer is to say why
        stop = 7
    given = {"peft_config": copy.deepcopy(changes.pop("peft_config", None))}
    recomputes = window == 16 and policy.supports_gradient_checkpointing
    settings = QUIET | {"gradient_checkpointing": recomputes, "log_console": "none", "output_dir": folder, "seed": 3}
    args = PPOConfig(
        **settings, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_ppo_epochs=1, num_mini_batches=1,
        total_episodes=len(ROWS), response_length=15, stop_token_id=stop, top_k=1, learning_rate=1e-3, **changes,
    )  # fmt: skip
    trainer = PPOTrainer(
        args, make_tokenizer(), policy, train_dataset=[{"input_ids": row} for row in ROWS], value_model=value_model,
        reward_funcs=lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids], **given,
    )  # fmt: skip
    models: Any = trainer.model
    rollouts = record_rollouts(trainer)
    torch.manual_seed(0)
    for name, weight in models.named_parameters():
        if ".lora_B." in name or ".score." in name:
            torch.nn.init.normal_(weight, std=0.2)
    before = copy.deepcopy(models).eval()
    trainer.train()
    (rollout,), policy = rollouts, models.policy
    critic, head = models.value_model, None
    if value_model is None:
        critic, head = plain(family, window, before.value_model), before.value_model.score.weight[0].detach()
    check_rows_alone(rollout, plain(family, window, before.policy), critic, head, args.temperature)
    check_padded(before, rollout, args.temperature)
    assert abs(trainer.state.log_history[0]["val/ratio"] - 1) < TOLERANCE
    assert any(not torch.equal(*pair) for pair in zip(policy.parameters(), before.policy.parameters(), strict=True))
    if given["peft_config"] is None:
        trainer.save_model(folder)
        again, ids = type(policy).from_pretrained(folder, dtype=torch.float32).eval(), torch.tensor(ROWS[0])
        check_close("saved logits", *(alone(each.eval(), ids)[0][:, :46] for each in (again, policy)))
    return "packed" if packs_rows(backbone(policy)) else "padded"


def outcome(family: str, way: str) -> str:
    """What came of a family: packed, padded, or the reason why it does not train."""
    found = []
    for window in WINDOWS:
        try:
            with torch.device("meta"):
                size = tiny_model(family, window=window).num_parameters()
            if size > 5e7:
                return f"not made: {size:,} parameters"
            plain(family, window, None)
        except Exception as error:
            return f"not made: {type(error).__name__}: {error!s:.200}"
        try:
            with tempfile.TemporaryDirectory() as folder:
                found.append(check_family(family, window, folder, **WAYS[way]))
        except Exception as error:
            return f"window {window}: {type(error).__name__}: {error!s:.400}"
    return " and ".join(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("sweep.jsonl"))
    parser.add_argument("--families", nargs="*", default=[])
    parser.add_argument("--ways", nargs="*", default=[*WAYS], choices=[*WAYS])
    given = parser.parse_args()
    torch.set_num_threads(1)
    set_verbosity_error()
    disable_progress_bar()
    warnings.simplefilter("ignore")
    given.results.touch()
    done = {(each["family"], each["way"]): each["outcome"] for each in map(json.loads, given.results.open())}
    for family, way in ((family, way) for family in given.families or families() for way in given.ways):
        if way == "lora" and family not in WITH_LORA:
            continue
        if (family, way) not in done:
            done[family, way] = outcome(family, way)
            with given.results.open("a") as file:
                file.write(json.dumps({"family": family, "way": way, "outcome": done[family, way]}) + "\n")
        print(f"{family:26} {way:13} {done[family, way]}", flush=True)
    for way in given.ways:
        outcomes = [what for (_, each), what in done.items() if each == way]
        print(way, Counter(what if what.startswith("pa") else what[:8] for what in outcomes))


if __name__ == "__main__":
    main()
