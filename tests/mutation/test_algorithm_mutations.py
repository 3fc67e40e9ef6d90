"""Break the algorithm room in one place at a time: its tests must notice every time."""

import shutil
from pathlib import Path

import pytest

from tests.mutation.nursery import ROOT, Nursery, assert_killed, assert_passed, assert_there_once, mutate

MUTATIONS = [
    ("masked.py", "torch.where(mask, values.float(), 0.0)", "values.float() * mask"),
    ("masked.py", "torch.where(mask, values.float(), 0.0)", "torch.where(~mask, values.float(), 0.0)"),
    ("masked.py", "torch.where(mask, values.float(), 0.0)", "torch.where(mask, values, 0.0)"),
    ("masked.py", "total / (num_tokens - 1).clamp(min=1)", "total / num_tokens.clamp(min=1)"),
    ("masked.py", "(num_tokens - 1).clamp(min=1)", "(num_tokens - 1)"),
    ("masked.py", "total / num_tokens.clamp(min=1)", "total / num_tokens"),
    ("masked.py", "total / num_tokens.clamp(min=1)", "total / mask.numel()"),
    ("masked.py", "mask.sum().float()", "torch.tensor(float(mask.shape[0] * mask.shape[1]))"),
    ("masked.py", "sums if reduce_sum is None else reduce_sum(sums)", "sums"),
    ("masked.py", "_sum_and_count(squares, mask, reduce_sum)", "_sum_and_count(squares, mask, None)"),
    ("masked.py", "mean = masked_mean(values, mask, reduce_sum)", "mean = masked_mean(values, mask)"),
    ("masked.py", "zero_outside(values.float() - mean, mask).square()", "zero_outside(values, mask).square()"),
    ("masked.py", "zero_outside(values.float() - mean, mask)", "(zero_outside(values, mask) - mean)"),
    ("masked.py", "whitened if shift_mean else whitened + mean", "whitened + mean"),
    ("masked.py", "whitened if shift_mean else whitened + mean", "whitened + mean if shift_mean else whitened"),
    ("masked.py", "(values.float() - mean) * torch.rsqrt", "(values.float() - mean) / torch.rsqrt"),
    ("masked.py", "rsqrt(var + 1e-8)", "rsqrt(var + 1e-5)"),
    ("masked.py", "if mask.shape != values.shape:", "if False:"),
    ("penalties.py", "logprobs.float() - ref_logprobs.float()", "ref_logprobs.float() - logprobs.float()"),
    ("penalties.py", "logprobs.float() - ref_logprobs.float()", "logprobs - ref_logprobs"),
    ("penalties.py", "torch.expm1(-log_ratio) + log_ratio", "torch.expm1(log_ratio) - log_ratio"),
    ("penalties.py", "torch.expm1(-log_ratio) + log_ratio", "(-log_ratio).exp() - 1 + log_ratio"),
    ("penalties.py", "scores - penalty", "scores + penalty"),
    ("penalties.py", "torch.where(stopped,", "torch.where(~stopped,"),
    ("penalties.py", "zero_outside(-kl_coef *", "zero_outside(kl_coef *"),
    ("penalties.py", "zero_outside(-kl_coef * kl.float(), response_mask)", "-kl_coef * kl.float()"),
    ("penalties.py", "num_tokens_left == 1", "num_tokens_left == 2"),
    ("penalties.py", "response_mask & (num_tokens_left == 1)", "(num_tokens_left == 1)"),
    ("penalties.py", "response_mask.flip(1).cumsum(dim=1).flip(1)", "response_mask.cumsum(dim=1)"),
    ("penalties.py", "if empty.any():", "if False:"),
    ("penalties.py", "rewards + zero_outside(token_scores", "rewards - zero_outside(token_scores"),
    ("penalties.py", "zero_outside(token_scores, response_mask)", "token_scores"),
    ("penalties.py", "rewards if token_scores is None else rewards +", "rewards if token_scores is None else"),
    ("advantages.py", "gamma * _next_values", "lam * _next_values"),
    ("advantages.py", "_discounted_sums(deltas, gamma * lam)", "_discounted_sums(deltas, lam)"),
    ("advantages.py", "_discounted_sums(deltas, gamma * lam)", "_discounted_sums(deltas, gamma)"),
    ("advantages.py", "bootstrap_values) - values", "bootstrap_values) + values"),
    ("advantages.py", "is_last, bootstrap_values.float()[:, None], next_values", "is_last, 0.0, next_values"),
    ("advantages.py", "is_last[:, :-1] &= ~real[:, 1:]", "pass"),
    ("advantages.py", "next_values[:, -1] = 0.0", "pass"),
    ("advantages.py", "values.roll(-1, dims=1)", "values.roll(1, dims=1)"),
    ("advantages.py", "real = response_mask.gather(1, places)", "real = response_mask"),
    (
        "advantages.py",
        "zero_outside(rewards, response_mask).gather(1, places)",
        "zero_outside(rewards, response_mask)",
    ),
    ("advantages.py", "zero_outside(values, response_mask).gather(1, places)", "zero_outside(values, response_mask)"),
    ("advantages.py", "places.argsort(dim=1)", "places"),
    ("advantages.py", "advantages.gather(1, tokens), (", "advantages, ("),
    ("advantages.py", "advantages + values", "advantages + rewards"),
    ("advantages.py", "advantages + values", "advantages - values"),
    ("advantages.py", "step += discount * following", "step += following"),
    ("losses.py", "unclipped_loss = -advantages * ratio\n", "unclipped_loss = advantages * ratio\n"),
    ("losses.py", "logprobs.float() - old_logprobs.float()).exp()", "old_logprobs.float() - logprobs.float()).exp()"),
    ("losses.py", "loss = torch.maximum(", "loss = torch.minimum("),
    ("losses.py", "loss if weights is None else loss * weights", "loss"),
    ("losses.py", "loss if weights is None else loss * weights", "loss if weights is None else loss / weights"),
    ("losses.py", "logprobs.float() - sampling_logprobs.float()", "sampling_logprobs.float() - logprobs.float()"),
    ("losses.py", ".clamp(max=clip_max)", ""),
    ("losses.py", ".clamp(max=clip_max)", ".clamp(min=clip_max)"),
    ("losses.py", ".clamp(max=clip_max).detach()", ".clamp(max=clip_max)"),
    ("losses.py", "clamp(1 - cliprange, 1 + cliprange)", "clamp(max=1 + cliprange)"),
    ("losses.py", "clamp(1 - cliprange, 1 + cliprange)", "clamp(min=1 - cliprange)"),
    ("losses.py", "ratio, clipped_loss > unclipped_loss", "ratio, clipped_loss >= unclipped_loss"),
    ("losses.py", "ratio, clipped_loss > unclipped_loss", "ratio, clipped_loss < unclipped_loss"),
    (
        "losses.py",
        "torch.maximum(unclipped_loss, clipped_loss), clipped",
        "torch.minimum(unclipped_loss, clipped_loss), clipped",
    ),
    ("losses.py", "torch.maximum(unclipped_loss, clipped_loss), clipped", "unclipped_loss, clipped"),
    ("losses.py", "loss), clipped_loss > unclipped_loss", "loss), clipped_loss >= unclipped_loss"),
    ("losses.py", "old_values - cliprange_value, old", "returns - cliprange_value, old"),
    ("losses.py", "0.5 * (values - returns)", "(values - returns)"),
    ("losses.py", "0.5 * (nearby_values - returns)", "(nearby_values - returns)"),
    (
        "losses.py",
        "zero_outside(per_token, mask).sum() / num_tokens",
        "zero_outside(per_token, mask).sum() / mask.sum()",
    ),
    ("losses.py", "zero_outside(per_token, mask).sum() / num_tokens", "per_token.float().sum() / num_tokens"),
    ("losses.py", "0.5 * (logprobs.float()", "(logprobs.float()"),
    (
        "losses.py",
        "masked_var(returns.float() - values.float(), mask, reduce_sum)",
        "masked_var(values, mask, reduce_sum)",
    ),
    ("losses.py", "masked_var(returns, mask, reduce_sum)", "masked_var(returns, mask)"),
    (
        "losses.py",
        "torch.where(returns_var > 0, 1 - residual_var / returns_var, 0.0)",
        "1 - residual_var / returns_var",
    ),
]


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    """A copy of the algorithm room and its tests alone, in an otherwise empty package."""
    for room in ("rlhf_ppo/algorithm", "tests/algorithm"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "rlhf_ppo" / "__init__.py").touch()
    return tmp_path


def files_for(first: str) -> list[str]:
    """All test files of the room: the mutated module's own first, which most likely kills, the slowest ones last."""
    mirror, slow = f"test_{first}", "test_properties.py"
    names = [path.name for path in (ROOT / "tests" / "algorithm").glob("test_*.py")]
    return [f"tests/algorithm/{name}" for name in sorted(names, key=lambda name: (name != mirror, name == slow, name))]


@pytest.mark.parametrize(("file", "original"), sorted({mutation[:2] for mutation in MUTATIONS}))
def test_what_is_broken_is_there(file: str, original: str):
    assert_there_once(ROOT / "rlhf_ppo" / "algorithm" / file, original)


@pytest.mark.slow
def test_the_untouched_copy_passes(sandbox: Path, nursery: Nursery):
    assert_passed(nursery.run(sandbox, files_for("masked.py")))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "original", "mutant"), MUTATIONS)
def test_the_mutant_is_killed(sandbox: Path, nursery: Nursery, file: str, original: str, mutant: str):
    mutate(sandbox / "rlhf_ppo" / "algorithm" / file, original, mutant)
    assert_killed(nursery.run(sandbox, files_for(file)))
