"""Architectures of every kind through a whole update at learning rate 0, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.rollout import Prompts, Rollout
from rlhf_ppo.generation.transformers_engine import greedy_config
from rlhf_ppo.models.heads import scalar_head
from rlhf_ppo.models.packing import PACKS
from rlhf_ppo.models.policy_and_value import response_logprobs, response_values
from rlhf_ppo.models.unwrapping import backbone
from tests.conftest import count_w4
from tests.models.architectures import families, tiny_model
from tests.runs import history, record_rollouts

FAST = [
    "gpt2", "phimoe", "falcon", "deepseek_v3",  # learned positions; random routing; dropout of its own; MLA
    "jamba", "falcon_h1", "lfm2", "qwen3_next", "recurrent_gemma",  # hybrids: in turn, in one layer, convolutions, ...
    "mamba", "rwkv", "gemma3", "llama4_text", "mbart",  # recurrent; composite; chunked attention; padding that counts
]  # fmt: skip
MORE = (
    "llama gemma2 gemma3_text qwen2 qwen3 qwen3_moe mistral mixtral phi phi3 olmo2 olmoe cohere2 granite "
    "granitemoehybrid gpt_neox gptj opt bloom stablelm smollm3 glm4 deepseek_v2 bamba mamba2 nemotron_h zamba gpt_oss"
).split()
ROWS = [[5, 9, 8], [7, 12, 20, 4, 31, 17, 6, 3], [6, 6, 3], [30, 4], [9, 4, 4, 4, 21, 13], [8], [3] * 5, [11, 12]]
TOLERANCE = 2e-4


NOT_CAUSAL = "in which a token's state depends on later tokens"
REFUSED = {"bert": NOT_CAUSAL, "cpmant": NOT_CAUSAL, "modernbert-decoder": "changes its logits after the head"}
"""What the error at construction says of families that cannot work."""


def cases(names: Iterable[str], fast: list[str]) -> list[Any]:
    """All of the names, of which the fast suite runs a few; those that this transformers lacks are skipped."""
    missing = pytest.mark.skip(f"transformers {transformers.__version__} has no such family")
    chosen = [pytest.param(name, marks=[] if name in families() else [missing]) for name in fast]
    return chosen + [pytest.param(name, marks=pytest.mark.slow) for name in names if name not in fast]


def make(make_trainer: Any, family: str, **changes: Any) -> PPOTrainer:
    policy = tiny_model(family)
    given: dict[str, Any] = {"value_model": None, **changes}
    return make_trainer(
        model=policy,
        reward_funcs=count_w4,
        train_dataset=[{"input_ids": row} for row in ROWS],
        gradient_checkpointing=policy.supports_gradient_checkpointing and given["value_model"] is None,
        learning_rate=0.0,
        total_episodes=len(ROWS),
        num_ppo_epochs=1,
        num_mini_batches=1,
        response_length=6,
        **given,
    )


@pytest.mark.parametrize("family", cases(MORE, FAST))
def test_an_update_at_learning_rate_zero(family: str, make_trainer: Any, tmp_path: Path) -> None:
    trainer = make(make_trainer, family)
    rollouts = record_rollouts(trainer)
    trainer.train()
    logged = history(trainer)[0]
    assert logged["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert logged["policy/approxkl_avg"] == pytest.approx(0, abs=1e-9)
    assert logged["objective/kl"] == pytest.approx(0, abs=1e-5)
    policy, value_model = trainer.model.policy.eval(), trainer.model.value_model.eval()
    check_rows_alone(rollouts[0], policy, value_model, trainer.args.temperature)
    check_padded(rollouts[0], policy, value_model, trainer.args.temperature)
    check_greedy_responses(trainer)
    trainer.save_model(str(tmp_path))
    ids = torch.tensor([ROWS[1]])
    # Of Emu3 and Mllama transformers builds a language model that only its own class loads.
    loader: Any = AutoModelForCausalLM if cast(Any, policy.config).model_type in families() else type(policy)
    again = loader.from_pretrained(tmp_path, dtype=torch.float32)(input_ids=ids).logits
    assert_close(again, cast(Any, policy)(input_ids=ids).logits)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=TOLERANCE, atol=TOLERANCE)


@torch.no_grad()
def check_rows_alone(rollout: Rollout, policy: Any, value_model: Any, temperature: float) -> None:
    """Each row's numbers are those that the models themselves give of its tokens alone."""
    context = rollout.context_length
    for row, real in enumerate(rollout.attention_mask):
        ids = rollout.query_responses[row, real][None]
        length = int(rollout.response_mask[row].sum())
        distribution = (policy(input_ids=ids).logits.float() / temperature).log_softmax(-1)[0, :-1]
        logprobs = distribution.gather(1, ids[0, 1:, None])[-length:, 0]
        assert_close(rollout.logprobs[row, :length], logprobs)
        head = cast(Any, scalar_head(value_model))
        values = head(backbone(value_model)(input_ids=ids).last_hidden_state)[0, :, 0]
        assert_close(rollout.values[row, :length], values[-length - 1 : -1])
    assert rollout.attention_mask[:, :context].sum(dim=1).unique().numel() > 3


@torch.no_grad()
def check_padded(rollout: Rollout, policy: Any, value_model: Any, temperature: float) -> None:
    """Packed rows give what padded rows give, in one pass of all of them."""
    models = (policy, value_model)
    batch = rollout.query_responses, rollout.attention_mask, rollout.response_mask
    proven = {model: vars(backbone(model)).get(PACKS, "") for model in models}
    for packs in (True, False):
        for model in models:
            setattr(backbone(model), PACKS, proven[model] if packs else "")
        assert_close(response_logprobs(policy, *batch, temperature).logprobs, rollout.logprobs)
        assert_close(response_values(value_model, *batch).values, rollout.values)
    for model in models:
        setattr(backbone(model), PACKS, proven[model])


@torch.no_grad()
def check_greedy_responses(trainer: PPOTrainer) -> None:
    """What is generated beside other prompts, of which some have ended, is the likeliest token of each row alone."""
    policy: Any = trainer.model.policy
    config = greedy_config(trainer.args, trainer.tokens.stop)
    responses = trainer.generate_responses(Prompts.of_rows(ROWS, 0, torch.device("cpu")), config)
    for row, real in enumerate(responses.attention_mask):
        tokens = responses.query_responses[row, real]
        length = int(responses.response_mask[row].sum())
        logits = policy(input_ids=tokens[None]).logits[0, -length - 1 : -1].float()
        chosen = logits.gather(1, tokens[-length:, None])[:, 0]
        assert (chosen >= logits.max(dim=1).values - 1e-3).all()


@pytest.mark.parametrize("family", cases(REFUSED, [*REFUSED]))
def test_families_that_cannot_work_are_refused_at_construction(family: str, make_trainer: Any) -> None:
    name = type(tiny_model(family)).__name__
    with pytest.raises(ValueError, match=f"{name}.*{REFUSED[family]}"):
        make(make_trainer, family)


# ---- Encoders as reward models ----


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "modernbert"])
def test_scores_of_encoders_are_those_of_each_text_alone(family: str, make_trainer: Any) -> None:
    model, rows = tiny_model(family, AutoModelForSequenceClassification), [{"input_ids": row} for row in ROWS]
    trainer = make_trainer(reward_model=model, train_dataset=rows, total_episodes=len(ROWS))
    rollouts = record_rollouts(trainer)
    trainer.train()
    (rollout,) = rollouts
    texts = zip(rollout.query_responses, rollout.attention_mask, strict=True)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=ids[real][None]).logits[:, 0] for ids, real in texts])
    assert_close(rollout.scores, alone)
    assert alone.unique().numel() > 4


# ---- Composite configurations: a language model among other parts ----


@pytest.mark.parametrize("family", cases(["qwen3_5"], ["gemma3"]))
def test_composite_models_serve_in_every_role_and_load_again(family: str, make_trainer: Any, tmp_path: Path) -> None:
    classifier = AutoModelForSequenceClassification
    first = make_trainer(
        model=tiny_model(family),
        value_model=tiny_model(family, classifier, seed=1),
        reward_model=tiny_model(family, classifier, seed=2),
        train_dataset=[{"input_ids": row} for row in ROWS],
        total_episodes=8,
        gradient_checkpointing=True,
        save_strategy="steps",
        save_steps=1,
        output_dir=str(tmp_path),
    )
    first.train()
    saved = tmp_path / "checkpoint-1"
    policy = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    value_model = classifier.from_pretrained(saved / "value_model", dtype=torch.float32)
    ids = torch.tensor([ROWS[1]])
    for again, trained in ((policy, first.model.policy), (value_model, first.model.value_model)):
        assert_close(again(input_ids=ids).logits, cast(Any, trained).eval()(input_ids=ids).logits)
