"""The value model of every language model, and modules with TRL's interface."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from trl.experimental.utils import get_reward

from rlhf_ppo.models.heads import token_values
from rlhf_ppo.models.loading import load_classifier, make_value_model
from tests.conftest import tiny_policy, tiny_scorer
from tests.models.architectures import tiny_model
from tests.models.test_architectures import cases
from tests.models.test_one_base import mean_id
from tests.models.test_peft import lora
from tests.runs import QUICK, die_and_resume, train_and_record

FAMILIES = (
    "llama gpt2 gemma3 olmoe granite cohere2 codegen ctrl mamba rwkv recurrent_gemma falcon_h1 nemotron_h lfm2 "
    "llama4_text ernie4_5 vaultgemma glm4_moe exaone mbart"
).split()
THEIRS = {"llama", "gpt2", "gemma3"}
"""Those of the families of which transformers has a sequence classifier with the same weights."""


def ragged() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 32, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :9] = mask[2, -4:] = False
    return ids, mask


@pytest.mark.parametrize("family", cases(FAMILIES))
@torch.no_grad()
def test_values_are_those_of_the_row_alone_and_of_the_model_loaded_again(family: str, tmp_path: Path) -> None:
    policy, (ids, mask) = tiny_model(family), ragged()
    model: Any = make_value_model(policy).eval()
    assert not token_values(model, ids, mask, 20).any()
    nn.init.normal_(model.score.weight)
    values = token_values(model, ids, mask, 20)
    for row, real in enumerate(mask):
        body = getattr(policy, "model", policy.base_model)
        alone = body(input_ids=ids[row, real][None]).last_hidden_state[0] @ model.score.weight[0]
        torch.testing.assert_close(values[row, real], alone, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    again = token_values(load_classifier(tmp_path, "value_model", is_value_model=True).eval(), ids, mask, 20)
    torch.testing.assert_close(again, values, rtol=1e-4, atol=1e-4)
    assert type(model).__name__.endswith("ForSequenceClassification") == (family in THEIRS)
    if family in THEIRS:
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
        torch.testing.assert_close(theirs(input_ids=ids[:1]).logits[:, 0], values[:1, -1], rtol=1e-4, atol=1e-4)


def test_a_language_models_directory_gives_its_backbone_and_a_new_head(tmp_path: Path) -> None:
    policy = tiny_model("olmoe")
    policy.save_pretrained(tmp_path)
    loaded: Any = load_classifier(tmp_path, "value_model", is_value_model=True)
    for name, weight in policy.base_model.named_parameters():
        assert torch.equal(loaded.base_model.get_parameter(name), weight)


def test_it_shares_the_base_of_a_policy_and_loads_from_its_adapter(make_trained: Any, tmp_path: Path) -> None:
    tiny_model("granite").save_pretrained(tmp_path / "base")
    given = {"value_model": None, "reward_funcs": mean_id, "peft_config": lora(), "share_base_model": True}
    steps = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 0.05}
    trainer = make_trained(model=str(tmp_path / "base"), **given, **steps, **QUICK)
    (*_, checkpoint) = sorted(Path(trainer.args.output_dir).glob("checkpoint-*"))
    (ids, mask), trained = ragged(), trainer.value_model.eval()
    loaded = load_classifier(checkpoint / "value_model", "value_model", is_value_model=True).eval()
    values = token_values(trained, ids, mask, 20)
    assert values.abs().max() > 1e-3
    torch.testing.assert_close(token_values(loaded, ids, mask, 20), values, rtol=1e-4, atol=1e-5)


# ---- TRL's interface ----


class Scorer(nn.Module):
    """A backbone and a head that only TRL's interface knows."""

    base_model_prefix = "body"

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body, self.head = tiny_scorer(seed=seed).model, nn.Linear(32, 1)

    def score(self, states: Tensor) -> Tensor:
        return self.head(states)


class CountsW4(nn.Module):
    """A rule without weights: the last number is the count of a token."""

    base_model_prefix = "rule"
    rule = property(lambda self: self)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(hidden_states=[input_ids[..., None].float()])

    def score(self, states: Tensor) -> Tensor:
        return (states == 7).float().cumsum(1)


def test_modules_with_trls_interface_score_and_value_as_in_trl(make_trainer: Any) -> None:
    reward, value = Scorer(3), Scorer(4)
    given = {"reward_model": [reward, CountsW4()], "value_model": value, "learning_rate": 0.0}
    trainer = make_trainer(**given, gradient_checkpointing=True, missing_eos_penalty=None, **QUICK)
    rollouts = train_and_record(trainer)
    for rollout in rollouts:
        for row, real in enumerate(rollout.responses.attention_mask):
            ids, length = rollout.responses.query_responses[row, real], int(rollout.response_mask[row].sum())
            with torch.no_grad():
                score = get_reward(reward, ids[None], -1, 0)[1][0] + (ids == 7).sum()
                values = get_reward(value, ids[None], -1, 0)[0][0, :, 0]
            torch.testing.assert_close(rollout.scores[row], score, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(rollout.values[row, :length], values[-length - 1 : -1], rtol=1e-5, atol=1e-5)


def test_a_run_with_trls_interface_resumes_to_the_bit(make_trainer: Any, tmp_path: Path) -> None:
    die_and_resume(make_trainer, tmp_path, lambda: {"value_model": Scorer(4)})


def test_a_module_with_neither_interface_is_refused(make_trainer: Any) -> None:
    with pytest.raises(ValueError, match=r"value_model is a Linear: pass .* with base_model_prefix and score"):
        make_trainer(model=tiny_policy(), value_model=nn.Linear(2, 1))
