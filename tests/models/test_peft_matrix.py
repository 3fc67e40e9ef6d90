"""Every kind of adapter that PEFT has: at learning rate 0 nothing differs, and afterwards only the adapter has moved.

A kind that a later PEFT adds fails here until it is listed, as one that works or as one that is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

import peft
import pytest
import torch
import transformers
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor, nn

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.generation.transformers_engine import greedy_config, sample_responses
from rlhf_ppo.models.adapters import shares_parameters
from tests.conftest import tiny_policy, tiny_scorer
from tests.runs import QUICK, history, parameters

QV: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
Q: dict[str, Any] = {"target_modules": ["q_proj"]}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LORA": ("LORA", {"r": 4, **QV}),
    "LORA dora": ("LORA", {"r": 4, "use_dora": True, **QV}),
    "LORA embeddings": ("LORA", {"r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "LORA ranks": ("LORA", {"r": 4, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}, **QV}),
    "LORA rslora": ("LORA", {"r": 4, "use_rslora": True, "lora_bias": True, **QV}),
    "LORA tokens": ("LORA", {"r": 4, "trainable_token_indices": [5, 9], **QV}),
    "LORA whole modules": ("LORA", {"r": 4, "modules_to_save": ["lm_head", "embed_tokens"], **QV}),
    "ADALORA": ("ADALORA", {"init_r": 4, "target_r": 2, "total_step": 100, **QV}),
    "ADAMSS": ("ADAMSS", {"r": 8, "num_subspaces": 2, **QV}),
    "ADAPTION_PROMPT": ("ADAPTION_PROMPT", {"adapter_len": 3, "adapter_layers": 2}),
    "BEFT": ("BEFT", Q),
    "BOFT": ("BOFT", {"boft_block_size": 4, **Q}),
    "C3A": ("C3A", {"block_size": 8, **Q}),
    "DEFT": ("DEFT", {"r": 4, **QV}),
    "DELORA": ("DELORA", {"r": 4, **QV}),
    "FOURIERFT": ("FOURIERFT", {"n_frequency": 20, "scaling": 1.0, **QV}),
    "FROD": ("FROD", {"progressbar": False, **Q}),
    "GLORA": ("GLORA", {"r": 4, **QV}),
    "GRALORA": ("GRALORA", {"r": 4, **QV}),
    "HIRA": ("HIRA", {"r": 4, **QV}),
    "HRA": ("HRA", {"r": 4, **QV}),
    "IA3": ("IA3", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LN_TUNING": ("LN_TUNING", {"target_modules": ["input_layernorm", "norm"]}),
    "LOHA": ("LOHA", {"r": 4, "rank_dropout": 0.5, "module_dropout": 0.5, **QV}),
    "LOKR": ("LOKR", {"r": 4, **QV}),
    "MISS": ("MISS", {"r": 4, **QV}),
    "OFT": ("OFT", {"oft_block_size": 4, **Q}),
    "OSF": ("OSF", QV),
    "PEANUT": ("PEANUT", {"r": 4, **QV}),
    "PSOFT": ("PSOFT", {"r": 4, **QV}),
    "PVERA": ("PVERA", {"r": 4, **Q}),
    "RANDLORA": ("RANDLORA", {"r": 4, **Q}),
    "ROAD": ("ROAD", {"group_size": 4, **QV}),
    "SHIRA": ("SHIRA", {"r": 2, **QV}),
    "SUPERTUNING": ("SUPERTUNING", QV),
    "TINYLORA": ("TINYLORA", {"u": 8, **QV}),
    "TRAINABLE_TOKENS": ("TRAINABLE_TOKENS", {"token_indices": [5, 9]}),
    "UNILORA": ("UNILORA", {"theta_d_length": 16, **QV}),
    "VBLORA": ("VBLORA", {"r": 2, "num_vectors": 16, "vector_length": 8, **Q}),
    "VERA": ("VERA", {"r": 4, **Q}),
    "WAVEFT": ("WAVEFT", {"n_frequency": 20, **Q}),
}
"""PEFT's name of the kind, and a configuration, by the name of the case."""

STARTS_ELSEWHERE = {"C3A", "FOURIERFT", "UNILORA", "VBLORA"}
"""Cases whose new adapter is not the identity: KL to the bare base is then more than 0 from the start."""

ONLY_OVER_A_BASE_OF_THEIR_OWN = {"ADAPTION_PROMPT": "trains layers", "TRAINABLE_TOKENS": "no modules_to_save"}


def cases(*in_check: str) -> Any:
    """Parametrize a test over all cases; those that are not named are slow together."""
    needs_sklearn = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                case, marks=[pytest.mark.slow] * (case not in in_check) + [needs_sklearn] * (case == "ADAMSS")
            )
            for case, (kind, _) in KINDS.items()
            if kind in PeftType.__members__  # an older PEFT has fewer
        ],
    )


IDS = torch.tensor([[5, 9, 3, 12, 20, 7, 31, 4]])


def config(kind: str, options: dict[str, Any]) -> Any:
    return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](task_type="CAUSAL_LM", **options)


def base(case: str) -> Any:
    return tiny_policy(attention_bias=case == "BEFT")  # BEFT trains biases alone


def trained(case: str) -> Any:
    """A policy whose adapter has moved off its start in every parameter."""
    torch.manual_seed(4)
    policy = peft.get_peft_model(base(case), config(*KINDS[case]))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return policy


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(IDS).logits


def reference_logits(trainer: PPOTrainer) -> Tensor:
    with trainer.reference.generating(trainer.model, trainer.policy_model) as holder:
        return logits(holder.policy)


@pytest.fixture
def make(make_trainer: Callable[..., PPOTrainer]) -> Callable[..., PPOTrainer]:
    """Factory of trainers that take an update of two epochs; no two responses are paid alike."""
    run = {**QUICK, "num_ppo_epochs": 2, "total_episodes": 2, "response_length": 8, "reward_funcs": sum_of_ids}
    return lambda **given: make_trainer(**{**run, **given})


def sum_of_ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(ids) / 100 for ids in completion_ids]


def updates(trainer: PPOTrainer, *metrics: str) -> list[tuple[float, ...]]:
    return [tuple(log[name] for name in metrics) for log in trainer.state.log_history if "val/ratio" in log]


def assert_ratio_is_one(trainer: PPOTrainer) -> None:
    """Up to rounding: the FFT of C3A depends on the number of rows."""
    for ratio, approxkl in updates(trainer, "val/ratio", "policy/approxkl_avg"):
        assert abs(ratio - 1) < 1e-6 and approxkl < 1e-12


@cases("LORA embeddings", "LORA tokens", "ADALORA", "ADAPTION_PROMPT", "IA3", "LOHA", "VERA")
def test_nothing_differs_at_learning_rate_0(make: Callable[..., PPOTrainer], case: str) -> None:
    start = logits(trained(case))
    trainer = make(model=trained(case), learning_rate=0.0)
    assert torch.equal(reference_logits(trainer), start) and torch.equal(logits(trainer.policy_model), start)
    trainer.train()
    assert updates(trainer, "objective/kl") == [(0.0,)]
    assert_ratio_is_one(trainer)

    trainer = make(model=base(case), peft_config=config(*KINDS[case]), learning_rate=0.0)
    trainer.train()
    assert_ratio_is_one(trainer)
    distance = max(abs(kl) for (kl,) in updates(trainer, "objective/kl"))
    assert (distance > 1e-5) == (case in STARTS_ELSEWHERE)
    assert torch.equal(reference_logits(trainer), logits(base(case)))


@cases("LORA embeddings", "LORA tokens", "ADAPTION_PROMPT")
def test_only_the_adapter_moves_and_over_one_base_it_moves_alike(make: Callable[..., PPOTrainer], case: str) -> None:
    given = {"learning_rate": 0.01, "value_model": None}
    if case in ONLY_OVER_A_BASE_OF_THEIR_OWN:
        with pytest.raises(ValueError, match=f"share_base_model=True.*{ONLY_OVER_A_BASE_OF_THEIR_OWN[case]}"):
            make(model=trained(case), share_base_model=True, **given)
        train_the_adapter_alone(make(model=trained(case), learning_rate=0.01), case)
        return
    shared = make(model=trained(case), share_base_model=True, **given)
    scorer, value_model = tiny_scorer(attention_bias=case == "BEFT"), cast(Any, shared.value_model)
    scorer.model.load_state_dict(base(case).model.state_dict())
    separate = make(
        model=trained(case), **given | {"value_model": scorer, "value_peft_config": value_model.active_peft_config}
    )
    separate.value_model.load_state_dict(value_model.state_dict())
    assert shares_parameters(shared.policy_model, shared.value_model)
    assert not shares_parameters(separate.policy_model, separate.value_model)

    shared.train()
    train_the_adapter_alone(separate, case)

    rounding = 0.0 if transformers.__version__ == "5.24.0" else 1e-5  # 5.17 adds up in another order
    for one, other in zip(history(shared), history(separate), strict=True):
        assert one == pytest.approx(other, rel=rounding, abs=rounding)
    ours, theirs = parameters(shared), parameters(separate)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=rounding)


def train_the_adapter_alone(trainer: PPOTrainer, case: str) -> None:
    """Train; neither the base nor the reference moves, and what samples is the adapted policy."""
    policy: Any = trainer.policy_model
    trains = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    before, start = {name: value.clone() for name, value in policy.named_parameters()}, logits(policy)
    ids = sample_responses(policy, Prompts(IDS, torch.ones_like(IDS).bool(), {}), greedy_config(trainer.args, None), 1)
    assert torch.equal(ids[0, 0], start[0, -1].argmax())  # token by token
    with torch.no_grad():
        assert torch.equal(policy(torch.cat((IDS, ids), dim=1)).logits[0, IDS.shape[1] - 1 : -1].argmax(-1), ids[0])

    trainer.train()

    assert {name for name, value in policy.named_parameters() if not torch.equal(value, before[name])} == trains
    assert torch.equal(reference_logits(trainer), start) and not torch.equal(logits(policy), start)
    with policy.disable_adapter():
        assert torch.equal(logits(policy), logits(base(case)))


# ---- What is refused ----


@pytest.mark.parametrize("role", ["value_model", "reward_model"])
def test_prompt_learning_is_refused_in_every_role(make: Callable[..., PPOTrainer], role: str) -> None:
    prompts = peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS")
    with pytest.raises(ValueError, match=f"{role} has an adapter of the kind PREFIX_TUNING: prompt learning adds"):
        make(**{role: peft.get_peft_model(tiny_scorer(), prompts)})
