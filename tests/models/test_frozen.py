"""Frozen models: no gradients, and offloading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from rlhf_ppo.models.frozen import Offload
from rlhf_ppo.run.construction import place_frozen
from tests.conftest import tiny_policy, tiny_scorer
from tests.runs import MakeTrainer, assert_identical, history, parameters

# ---- Weights that stay on the CPU ----


def addresses(model: nn.Module) -> list[int]:
    return [value.data_ptr() for value in [*model.parameters(), *model.buffers()]]


def test_weights_are_lent_for_the_time_of_a_context() -> None:
    """The device is the CPU, too: what is lent are copies at other addresses."""
    model = tiny_scorer(tie_word_embeddings=True)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    offload = Offload(model, torch.device("cpu"))
    home = addresses(model)
    for _ in range(2):
        with offload():
            assert not set(addresses(model)) & set(home)
            assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        assert addresses(model) == home
    with pytest.raises(RuntimeError, match="inside"), offload():
        raise RuntimeError("inside")
    assert addresses(model) == home


class NothingStays(Offload):
    """Counts its uses, and leaves NaN where the weights were while they are not lent."""

    uses = -1  # the constructor returns them, too

    def _return(self) -> None:
        self.uses += 1
        for weight in self._weights:
            weight.data = torch.full_like(weight, torch.nan)


def test_offloaded_models_give_the_same_run(make_trainer: MakeTrainer) -> None:
    """Reference and reward model are lent once in each of two updates, and never read while they are not there."""
    runs = []
    for offloads in (False, True):
        trainer = make_trainer(ref_model=tiny_policy(seed=3), reward_model=tiny_scorer(seed=4))
        frozen = [trainer.reference.model, trainer.scorer.sources["reward_model"].scorer] if offloads else []
        for model in frozen:
            model.offload = NothingStays(model, torch.device("cpu"))
        trainer.train()
        assert [model.offload.uses for model in frozen] == [2] * len(frozen)
        runs.append({"history": history(trainer), "parameters": parameters(trainer)})
    assert_identical(*runs)


def test_the_constructor_offloads_whole_models_but_no_adapter_over_the_policys_base(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moving the latter would take the policy's own weights away."""
    asked: dict[str, bool] = {}

    def place(model: nn.Module, accelerator: Any, offload: bool) -> nn.Module:
        asked[f"{type(model).__name__} {len(asked)}"] = offload
        return place_frozen(model, accelerator, offload)

    monkeypatch.setattr("rlhf_ppo.run.construction.place_frozen", place)
    over_base = get_peft_model(scorer_over(tiny_policy()), LoraConfig(target_modules=["q_proj"]))
    make_trainer(
        peft_config=LoraConfig(target_modules=["q_proj"]), value_model=None, share_base_model=True,
        reward_model=[over_base, tiny_scorer(seed=4)], ref_model=tiny_policy(), offload_frozen=True,
    )  # fmt: skip
    assert asked == {"FrozenPolicy 0": True, "FrozenScorer 1": False, "FrozenScorer 2": True}


def scorer_over(policy: LlamaForCausalLM) -> LlamaForSequenceClassification:
    scorer = tiny_scorer()
    scorer.model.load_state_dict(policy.model.state_dict())
    return scorer
