"""Rows that begin alike are computed once, and have the states and gradients of each row alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from peft import LoraConfig, get_peft_model
from torch import Tensor

from rlhf_ppo.data import prefix_tree as prefixes
from rlhf_ppo.data.rollout import PackedIndices
from rlhf_ppo.models import packing
from rlhf_ppo.models.frozen import FrozenScorer
from rlhf_ppo.models.packing import hidden_states, pack_rows, packs_rows, share_prefixes, shares_prefixes
from rlhf_ppo.models.unwrapping import backbone, set_learning
from tests.conftest import tiny_policy, tiny_scorer
from tests.models.test_one_base import mean_id
from tests.models.test_packing import COMPUTES_IN_32_BITS, PACKING, alone, check_alone, model_of, padded
from tests.runs import QUICK, MakeTrainer, die_and_resume, logged, record_rollouts


def drawn(length: int, seed: int) -> list[int]:
    return torch.randint(0, 31, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


A, B, C, D = drawn(12, 1), drawn(9, 2), drawn(10, 3), drawn(8, 4)
DEEP = [A + B + C + D, A + drawn(5, 5), A + B + drawn(3, 6), A + B + C + drawn(4, 7), drawn(7, 8), A + B + C + D + [3]]
TREES: dict[str, list[list[int]]] = {
    "four deep": [*DEEP, A + B + C + D + [5, 6]],
    "a row begins others, and equal rows": [A + B, A, A + B + C, A + B, A],
    "one prompt": [A + B + drawn(size, size) for size in (1, 4, 9, 2)],
    "equal rows": [A + B] * 3,
}


pytestmark = pytest.mark.usefixtures("each_model_is_looked_at")


class Lengths:
    """Counts the tokens that each pass of a model's body computes."""

    def __init__(self, model: Any) -> None:
        self.seen: list[int] = []
        backbone(model).get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: Any, inputs: Any, output: Tensor) -> None:
        self.seen.append(output.shape[0] * output.shape[1])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", PACKING)
def test_states_and_gradients_are_those_of_each_row_alone(name: str, tree: str, checkpointing: bool) -> None:
    """Windows are 3 tokens long, shared beginnings 12 to 39; norms and rotations are in float32."""
    dtype, tolerance = (torch.float32, 1e-5) if name in COMPUTES_IN_32_BITS else (torch.float64, 1e-6)
    model, rows = model_of(name).to(dtype), TREES[tree]
    lengths = Lengths(model)
    check_alone(model, rows, tolerance, left=2, recomputes=checkpointing)
    assert lengths.seen[-1] == prefixes.num_computed(PackedIndices.of(*padded(rows)).squeezed_rows)
    assert lengths.seen[-1] < 0.8 * sum(map(len, rows))


def test_gradients_are_exact_in_float64() -> None:
    check_alone(model_of("gpt2").double(), TREES["four deep"], 1e-11)


def test_adapters_with_dropout_share_because_models_learn_without_it() -> None:
    torch.manual_seed(0)
    adapted = get_peft_model(model_of("llama"), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5))
    for key, weight in adapted.named_parameters():
        if ".lora_B." in key:
            torch.nn.init.normal_(weight, std=0.2)
    set_learning(adapted)
    lengths = Lengths(adapted)
    check_alone(adapted, TREES["four deep"], 1e-5)
    assert lengths.seen[-1] < 0.5 * sum(map(len, TREES["four deep"]))


@torch.no_grad()
def test_sixteen_bits_are_as_far_from_float32_as_packed_rows_are() -> None:
    model = model_of("llama")
    expected = alone(model, TREES["four deep"])
    half = copy.deepcopy(model).bfloat16()
    pack_rows(half)
    ids, mask = padded(TREES["four deep"])
    errors = []
    for shared in (False, True):
        share_prefixes(shared, half)
        errors.append(float((hidden_states(half, ids, mask)[mask] - expected).norm() / expected.norm()))
    assert 1e-4 < errors[0] < 0.02 and errors[1] < 1.2 * errors[0]


@torch.no_grad()
def test_a_reward_models_scores_are_those_of_each_row_alone() -> None:
    model, rows = tiny_scorer(), TREES["a row begins others, and equal rows"]
    expected = torch.cat([model(input_ids=torch.tensor([row])).logits[:, 0] for row in rows])
    scorer = FrozenScorer(model)
    lengths = Lengths(model)
    assert_allclose(scorer(*padded(rows, left=3)), expected, rtol=0, atol=1e-5)
    assert lengths.seen == [31]


# ---- What must not be shared ----


@torch.no_grad()
def test_rows_that_share_nothing_are_computed_as_without_sharing_bit_for_bit() -> None:
    model = tiny_policy()
    pack_rows(model)
    ids, mask = padded([drawn(size, size) for size in (9, 20, 4)])
    shared = hidden_states(model, ids, mask)
    share_prefixes(False, model)
    assert torch.equal(hidden_states(model, ids, mask), shared)


def test_a_branch_that_sees_another_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant lets each node attend to all earlier ones; packed rows alone are right."""
    right = packing._attend_node_by_node

    def leaking(attend: packing.Attend, states: Any, tree: prefixes.PrefixTree) -> Tensor:
        paths = [tuple(range(node)) for node in range(len(tree.lengths))]
        return right(attend, states, prefixes.PrefixTree(tree.tokens, tree.expand, tree.lengths, paths))

    model = model_of("llama")
    ids, mask = padded(DEEP)
    expected = alone(model, DEEP)
    pack_rows(model)
    monkeypatch.setattr(packing, "_attend_node_by_node", leaking)
    assert float((hidden_states(model, ids, mask)[mask] - expected).abs().max()) > 0.01
    monkeypatch.setattr(packing, "_LOOKS", {})
    other = model_of("llama")
    pack_rows(other)
    assert not packs_rows(backbone(other))


@pytest.mark.parametrize(("given", "shares"), [(None, True), (False, False)])
def test_the_option_decides(given: bool | None, shares: bool) -> None:
    model = model_of("llama")
    assert not shares_prefixes(backbone(model)), "it does not pack yet"
    pack_rows(model)
    share_prefixes(given, model)
    assert shares_prefixes(backbone(model)) == shares


# ---- Whole runs ----

SHARED: dict[str, Any] = {
    **QUICK,
    **{"reward_funcs": mean_id, "learning_rate": 0.01, "num_generations": 4, "num_ppo_epochs": 2},
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "total_episodes": 16},
    "train_dataset": [{"input_ids": A + B[:size]} for size in (1, 9, 4)],
}
LORA = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3)
RUNS: dict[str, dict[str, Any]] = {
    "two models": {},
    "one body": {"value_model": "policy"},
    "adapters over one base": {"peft_config": LORA, "share_base_model": True, "value_model": None},
    "recomputed": {"gradient_checkpointing": True},
    "few tokens a pass": {"max_tokens_per_micro_batch": 40},
    "a reward model": {"reward_funcs": None, "reward_model": "tiny"},
    "texts beside": {"ptx_coef": 0.5, "ptx_dataset": [{"input_ids": A + C[:size]} for size in (3, 5)]},
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_that_without_sharing(run: str, make_trainer: MakeTrainer) -> None:
    """Two updates on the same responses; sampling is the same, and the numbers differ by rounding."""
    given = copy.deepcopy(SHARED | RUNS[run])
    if given.get("reward_model"):
        given["reward_model"] = tiny_scorer()
    logs, rollouts, counted = [], [], []
    for shared in (False, None):
        trainer = make_trainer(**copy.deepcopy(given), share_prefixes=shared)
        lengths, seen = Lengths(trainer.policy_model), record_rollouts(trainer)
        trainer.train()
        logs.append(trainer.state.log_history[:2])
        rollouts.append(seen)
        counted.append(sum(lengths.seen))
    assert counted[1] < 0.75 * counted[0]
    for ours, theirs in zip(*rollouts, strict=True):
        assert torch.equal(ours.responses.query_responses, theirs.responses.query_responses)
    for ours, theirs in zip(logs[1], logs[0], strict=True):
        assert theirs["batch/shared_frac"] == 0 and 0.4 < ours["batch/shared_frac"] < 0.8
        for name, value in theirs.items():
            if not name.startswith(("time/", "eps", "batch/", "val/ratio_var", "val/first_logratio")):
                assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
        assert ours["val/first_logratio"] < 1e-6


def test_a_resumed_run_is_bit_for_bit_the_whole_one(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    _, whole = die_and_resume(make_trainer, tmp_path, lambda: copy.deepcopy(SHARED))
    assert logged(whole, "batch/shared_frac")[-1] > 0.4
