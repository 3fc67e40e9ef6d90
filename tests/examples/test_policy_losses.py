"""Each loss of examples/policy_losses.py against numbers by hand, and `--policy_loss` by file."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from numpy.testing import assert_allclose
from torch import Tensor

from examples import policy_losses
from examples.policy_losses import cispo, dual_clip, gspo
from rlhf_ppo import PPOConfig
from rlhf_ppo.algorithm import PolicyLoss
from rlhf_ppo.run.learning import resolve_policy_loss


def given(old: list[list[float]], advantages: list[list[float]], **how: Any) -> Any:
    """A micro-batch without the fields that losses do not read."""
    tensors = {"logprobs": torch.tensor(old), "advantages": torch.tensor(advantages)}
    mask = torch.ones(tensors["logprobs"].shape, dtype=torch.bool)
    return SimpleNamespace(**tensors | {"loss_mask": mask, "importance_weights": None} | how)


def check(loss: Any, logprobs: Tensor, mask: Tensor, expected: list[float], gradient: list[float]) -> None:
    loss.masked_fill(~mask, 0.0).sum().backward()
    assert_allclose(loss.detach()[mask], expected, rtol=1e-5)
    assert_allclose(logprobs.grad[mask], gradient, rtol=1e-5)


def test_gspo_clips_the_geometric_mean_of_a_responses_ratios() -> None:
    mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    logprobs = torch.tensor([[-1.0, -2.0, math.nan, -0.5], [-1.0, 9.0, 9.0, 9.0]], requires_grad=True)
    batch = given(
        [[-1.1, -2.1, -1.0, -0.4], [-1.4, 0.0, 0.0, 0.0]],
        [[2.0, -1.0, 5.0, 3.0], [1.0, 5.0, 5.0, 5.0]],
        loss_mask=mask,
        importance_weights=torch.full((2, 4), 0.5),
    )
    result = gspo(logprobs, batch, SimpleNamespace(cliprange=0.3, cliprange_high=0.4))
    first = math.exp(0.1 / 3)
    expected = [-first, 0.5 * first, -1.5 * first, -0.5 * 1.4]
    check(result.loss, logprobs, mask, expected, [*expected[:3], 0])
    assert_allclose(result.ratio.detach()[mask], [first, first, first, math.exp(0.4)], rtol=1e-5)
    assert result.clipped[mask].tolist() == [False, False, False, True]


def test_cispo_limits_weights_and_leaves_every_token_its_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -1.0, -3.0]], requires_grad=True)
    batch = given([[-1.0, -2.0, -2.0]], [[2.0, 2.0, -1.0]], importance_weights=torch.tensor([[1.0, 0.5, 1.0]]))
    result = cispo(logprobs, batch, SimpleNamespace(cliprange=0.2, cliprange_high=0.5))
    small = math.exp(-1)
    check(result.loss, logprobs, batch.loss_mask, [2.0, 1.5, -3 * small], [-2.0, -1.5, small])
    assert_allclose(result.ratio, [[1.0, math.e, small]], rtol=1e-6)


def test_dual_clip_bounds_the_loss_of_worse_tokens_alone() -> None:
    logprobs = torch.tensor([[5.0, 2.5, 0.5, 5.0, 0.5]]).log().requires_grad_()
    batch = given([[0.0] * 5], [[-2.0, -2.0, -2.0, 2.0, 2.0]])
    result = dual_clip(logprobs, batch, SimpleNamespace(cliprange=0.2, cliprange_high=None))
    check(result.loss, logprobs, batch.loss_mask, [6.0, 5.0, 1.6, -2.4, -1.0], [0, 5.0, 0, 0, -1.0])
    assert result.clipped.tolist() == [[True, False, True, True, False]]


def test_every_loss_is_imported_here_and_named_in_the_recipes_and_in_the_help() -> None:
    functions = dict(inspect.getmembers(policy_losses, inspect.isfunction))
    losses = {name for name, loss in functions.items() if loss.__annotations__["return"] is PolicyLoss}
    losses -= {"clipped_policy_loss"}
    assert losses == losses & globals().keys()
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8").lower()
    (text,) = (field.metadata["help"].lower() for field in fields(PPOConfig) if field.name == "policy_loss")
    names = {name.replace("_", " ") for name in losses}
    assert [name for name in names if name not in page] == [], "name these losses in docs/recipes.md"
    assert [name for name in names if name not in text] == [], "name these losses in the help of policy_loss"


def test_an_option_names_the_file_and_the_function() -> None:
    function: Any = resolve_policy_loss("examples/policy_losses.py:gspo")
    assert function.__name__ == "gspo"
