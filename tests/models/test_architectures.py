"""Architectures of every kind through an update, compared with each row alone, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    CLIPImageProcessor,
    LlavaProcessor,
)

from rlhf_ppo.cli.trainers import merge_adapter
from rlhf_ppo.models.adapters import load_adapter, save_adapter
from rlhf_ppo.models.loading import load_policy
from tests.conftest import count_w4, make_tokenizer, needs_continuous, tiny_scorer
from tests.models.architectures import families, tiny_config, tiny_model
from tests.models.sweep import LORA, check_family, check_rows_alone
from tests.runs import train_and_record

FAST = (
    "llama qwen2 qwen3 qwen2_moe qwen3_moe mistral mixtral gemma gemma2 gemma3_text gemma3n_text gemma4_text phi3 "
    "phimoe gpt2 gpt_neox opt olmo2 granite cohere2 glm4 deepseek_v3 falcon_h1 lfm2 mamba llama4_text qwen3_next "
    "modernbert-decoder qwen4_exp_text rwkv xglm"
).split()
"""Families that people use, and those that code of their own serves; `make test-models` has all."""
CONTINUOUS = ["llama", "qwen2_moe", "gemma3_text"]
ROWS = [[5, 9, 8], [7, 12, 20, 4, 31, 17, 6, 3], [6, 6, 3], [30, 4], [9, 4, 4, 4, 21, 13], [8], [3] * 5, [11, 12]]

NOT_CAUSAL = "in which a token's state depends on later tokens"
REFUSED = {
    "bert": NOT_CAUSAL, "cpmant": NOT_CAUSAL,
    "prophetnet": "whose logits are not what its head makes of the last hidden states",
    "reformer": "whose gradients cannot be computed outside training mode",
}  # fmt: skip
"""What the error at construction says of families that cannot work."""


def cases(names: Iterable[str], is_slow: bool = False) -> list[Any]:
    """All of the names; those that this transformers lacks are skipped."""
    missing = pytest.mark.skip(f"transformers {transformers.__version__} has no such family")
    marks = [pytest.mark.slow] if is_slow else []
    return [pytest.param(name, marks=marks if name in families() else [missing]) for name in names]


@pytest.mark.parametrize("family", cases(FAST))
def test_an_update_reads_each_row_as_if_it_were_alone(family: str, tmp_path: Path) -> None:
    """Rows are longer than windows, chunks and top-k of 4 tokens; the oracle is plain transformers."""
    check_family(family, 4, str(tmp_path))


@pytest.mark.parametrize("family", cases(["llama4_text"]))
def test_all_linear_leaves_out_routers_which_peft_cannot_adapt(family: str, tmp_path: Path) -> None:
    """They are linear layers by their class, and return tuples."""
    check_family(family, 4, str(tmp_path), peft_config=LORA, share_base_model=True)


@needs_continuous
@pytest.mark.parametrize("family", cases(CONTINUOUS))
def test_continuous_batching_reads_each_row_as_if_it_were_alone(family: str, tmp_path: Path) -> None:
    check_family(family, 16, str(tmp_path), generation_engine="continuous")


@needs_continuous
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("openai-gpt", "differ from those of each row alone"),
        ("mamba", "Invalid layer type"),
        ("falcon", "no complete response"),
    ],
)
def test_continuous_batching_refuses_at_construction_what_it_cannot_run(
    family: str, reason: str, tmp_path: Path
) -> None:
    name = type(tiny_model(family)).__name__
    sentence = (
        f"generation_engine='continuous' cannot run a {name}: .*{reason}.*; set generation_engine='transformers'$"
    )
    with pytest.raises(ValueError, match=sentence):
        check_family(family, 4, str(tmp_path), generation_engine="continuous")


@pytest.mark.parametrize("family", cases(REFUSED))
def test_families_that_cannot_work_are_refused_at_construction(family: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{type(tiny_model(family)).__name__}.*{REFUSED[family]}"):
        check_family(family, 4, str(tmp_path))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


# ---- Encoders as reward models ----


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "modernbert", "modernbert-decoder"])
def test_scores_of_models_with_their_own_pooling_are_those_of_each_text_alone(family: str, make_trainer: Any) -> None:
    model, rows = tiny_model(family, AutoModelForSequenceClassification), [{"input_ids": row} for row in ROWS]
    model.config.pad_token_id = 35  # ModernBERT's decoder reads the token before it
    trainer = make_trainer(reward_model=model, train_dataset=rows, total_episodes=len(ROWS))
    (rollout,) = train_and_record(trainer)
    texts = zip(rollout.responses.query_responses, rollout.responses.attention_mask, strict=True)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=ids[real][None]).logits[:, 0] for ids, real in texts])
    assert_close(rollout.scores, alone)
    assert alone.unique().numel() > 4


# ---- Composite configurations: a language model among other parts ----


@pytest.mark.parametrize("family", cases(["gemma3"]) + cases(["qwen3_5"], is_slow=True))
def test_composite_models_serve_in_every_role_and_load_again(family: str, make_trained: Any, tmp_path: Path) -> None:
    classifier = AutoModelForSequenceClassification
    first = make_trained(
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
    saved = tmp_path / "checkpoint-1"
    policy = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    value_model = classifier.from_pretrained(saved / "value_model", dtype=torch.float32)
    ids = torch.tensor([ROWS[1]])
    for again, trained in ((policy, first.model.policy), (value_model, first.model.value_model)):
        assert_close(again(input_ids=ids).logits, cast(Any, trained).eval()(input_ids=ids).logits)


def test_a_policy_by_path_is_saved_as_the_class_and_with_the_processor_that_it_came_with(
    make_trainer: Any, tmp_path: Path
) -> None:
    """Of Qwen 3.5 transformers also has a class for texts alone."""
    torch.manual_seed(0)
    policy, tokenizer = AutoModelForImageTextToText.from_config(tiny_config("qwen3_5")).eval(), make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    processor = LlavaProcessor(CLIPImageProcessor(), tokenizer, patch_size=4, vision_feature_select_strategy="full")
    for part in (policy, processor):
        part.save_pretrained(tmp_path / "policy")
    given = {"train_dataset": [{"input_ids": row} for row in ROWS], "value_model": None, "reward_funcs": count_w4}
    sizes = {"total_episodes": 8, "response_length": 3, "top_k": 1, "num_ppo_epochs": 1}
    for name, own in {"beside": None, "given": processor}.items():
        trainer = make_trainer(model=str(tmp_path / "policy"), processing_class=own, **given, **sizes)
        if own is None:
            rollouts = train_and_record(trainer)
            check_rows_alone(rollouts[0], policy, None, None, trainer.args.temperature)
        trainer.save_model(str(tmp_path / name))
        saved, info = type(policy).from_pretrained(tmp_path / name, output_loading_info=True)
        assert saved.config.architectures == [type(policy).__name__] and not info["missing_keys"]
        assert (tmp_path / name / "processor_config.json").is_file()


def test_an_adapter_is_merged_into_the_class_that_it_was_trained_over(tmp_path: Path) -> None:
    """Over the class for texts alone no weight of the adapter has a place: PEFT only warns."""
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(tiny_config("qwen3_5")).save_pretrained(tmp_path / "base")
    for_texts = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    policies = {"run": load_policy(str(tmp_path / "base"), "model"), "of_texts": for_texts}
    for name, policy in policies.items():
        config = LoraConfig(target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        policies[name] = get_peft_model(cast(Any, policy), config).eval()
        save_adapter(policies[name], str(tmp_path / name))

    merge_adapter(str(tmp_path / "run"), None)
    merged, ids = load_policy(str(tmp_path / "run"), "model").eval(), torch.tensor([ROWS[1]])
    assert type(merged).__name__ == "Qwen3_5ForConditionalGeneration"
    assert not (tmp_path / "run" / "adapter_config.json").exists()
    with torch.no_grad():
        trained, base = policies["run"](input_ids=ids).logits, load_policy(str(tmp_path / "base"), "model").eval()
        assert_close(merged(input_ids=ids).logits, trained)
        assert (base(input_ids=ids).logits - trained).abs().max() > 0.1

    unfit = "is an adapter over another class of model than"
    with pytest.raises(ValueError, match=f"of_texts {unfit} Qwen3_5ForConditionalGeneration"):
        load_policy(str(tmp_path / "of_texts"), "model")
    save_adapter(policies["run"], str(tmp_path / "kept"))
    with pytest.raises(ValueError, match=f"kept {unfit} LlamaForSequenceClassification"):
        load_adapter(tiny_scorer(), tmp_path / "kept")
