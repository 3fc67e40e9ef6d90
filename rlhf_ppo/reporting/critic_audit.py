"""Critic audit: the value model against Monte Carlo returns of prefixes of responses.

Kazemnejad et al., *VinePPO*, arXiv 2410.01679, section 7, measure a critic like this: cut a response, sample
continuations of the prefix from the policy, and compare the mean of their returns with the value at the cut.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.files import optional, write_json
from rlhf_ppo.data.images import IMAGES_COLUMN
from rlhf_ppo.data.rollout import Prompts, Responses, Rollout, sent
from rlhf_ppo.reporting.run_log import AUDIT_NAME

Array = NDArray[Any]

NUM_RESAMPLES = 1000
"""Bootstrap resamples of the prompts behind each interval."""


class Estimate(NamedTuple):
    """A figure with its 95% bootstrap interval over prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class AuditedPrefixes:
    """Prefixes of responses, each with the critic's value and the returns of sampled continuations.

    Attributes:
        prompts: Index of the prompt of each prefix, int `(N,)`; rows of the data set may share a prompt.
        values: The critic's value of the prefix, in the reward's unit, `(N,)`.
        prompt_means: Mean return of other responses to the prompt, which share no token with the prefix, `(N,)`.
        returns: Discounted sum of the rewards behind the prefix, for each of M continuations, `(N, M)`; M >= 2.
    """

    prompts: Array
    values: Array
    prompt_means: Array
    returns: Array

    def take(self, rows: Array, prompts: Array) -> AuditedPrefixes:
        """Return some prefixes, with other prompt indices."""
        return AuditedPrefixes(prompts, self.values[rows], self.prompt_means[rows], self.returns[rows])

    @property
    def means(self) -> Array:
        """Monte Carlo estimate of each prefix's value: the mean of its returns, `(N,)`."""
        return self.returns.mean(axis=1)

    @property
    def noise(self) -> float:
        """Mean sampling variance of `means`: the mean of s^2 / M."""
        return float(self.returns.var(axis=1, ddof=1).mean() / self.returns.shape[1])


@dataclass(frozen=True)
class CriticAudit:
    """Result of a critic audit.

    Attributes:
        figures: Estimates by name.
            `explained_variance`: of the critic; `explained_variance_of_prompt`: of a baseline that does not read the
            response, the mean return of other responses to the prompt.
            `gain_over_prompt`: the critic's explained variance minus the baseline's.
            `tau`: Kendall's tau-b between values and returns among the prefixes of one prompt; `tau_ceiling`, between
            two halves of the continuations.
        num_prompts: Number of prompts.
        num_prefixes: Number of prefixes.
        num_continuations: Continuations of each prefix.
        findings: What is wrong with the critic, a sentence each; empty if nothing was found.
    """

    figures: Mapping[str, Estimate]
    num_prompts: int
    num_prefixes: int
    num_continuations: int
    findings: list[str]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the audit, by name."""
        found = {f"critic/{name}": estimate.value for name, estimate in self.figures.items()}
        return found | {"critic/gain_over_prompt_low": self.figures["gain_over_prompt"].low}

    @optional("The critic's audit")
    def save(self, directory: str | Path) -> None:
        """Write `critic_audit.json`."""
        content = asdict(self) | {"figures": {name: each._asdict() for name, each in self.figures.items()}}
        write_json(Path(directory, AUDIT_NAME), content)

    def __str__(self) -> str:
        sizes = f"{self.num_prefixes} prefixes of {self.num_prompts} prompts, {self.num_continuations} continuations"
        figures = "; ".join(f"{name} {estimate}" for name, estimate in self.figures.items())
        return f"Critic audit ({sizes}): {figures}. " + (" ".join(self.findings) or "No defect found.")


def audit(prefixes: AuditedPrefixes, seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> CriticAudit:
    """Compare values with Monte Carlo returns.

        EV(p) = 1 - (Var(G - p) - noise) / (Var(G) - noise)

    where `G` is the mean of a prefix's returns, `p` a prediction, and noise the mean of s^2 / M, which no prediction
    can explain. Intervals resample prompts with all their prefixes.

    Args:
        prefixes: Prefixes with values and returns, of at least two prompts.
        seed: Seed of the bootstrap.
        num_resamples: Number of resamples.
    """
    prompts = np.unique(prefixes.prompts)
    if len(prompts) < 2:
        raise ValueError("the prefixes belong to one prompt; an audit needs at least 2 prompts")
    rows_of = [np.flatnonzero(prefixes.prompts == prompt) for prompt in prompts]
    pairs = np.stack([_pairs(prefixes, rows) for rows in rows_of])
    of_all, drawn = _figures(prefixes, pairs.sum(axis=0)), []
    generator = np.random.default_rng(seed)
    while len(drawn) < num_resamples:
        chosen = generator.integers(len(prompts), size=len(prompts))
        if len(np.unique(chosen)) > 1:
            rows = np.concatenate([rows_of[each] for each in chosen])
            copies = np.repeat(np.arange(len(chosen)), [len(rows_of[each]) for each in chosen])
            drawn.append(_figures(prefixes.take(rows, copies), pairs[chosen].sum(axis=0)))
    figures = {}
    for name, value in of_all.items():
        found = np.array([each[name] for each in drawn])
        found = found[np.isfinite(found)]
        low, high = np.quantile(found, (0.025, 0.975)) if len(found) else (np.nan, np.nan)
        figures[name] = Estimate(value, float(low), float(high))
    signal = max(float(np.var(prefixes.means)) - prefixes.noise, 0.0)  # variance of the prefixes' true values
    found = findings(figures, float(np.std(prefixes.values)), signal**0.5)
    num_prefixes, num_continuations = prefixes.returns.shape
    return CriticAudit(figures, len(prompts), num_prefixes, num_continuations, found)


def _figures(prefixes: AuditedPrefixes, pairs: Array) -> dict[str, float]:
    _, group = np.unique(prefixes.prompts, return_inverse=True)
    of_prompt = (np.bincount(group, prefixes.prompt_means) / np.bincount(group))[group]
    own, of_baseline = (_explained(prefixes, predicted) for predicted in (prefixes.values, of_prompt))
    tau, ceiling = map(_tau, pairs)
    return {
        "explained_variance": own,
        "explained_variance_of_prompt": of_baseline,
        "gain_over_prompt": own - of_baseline,
        "tau": tau,
        "tau_ceiling": ceiling,
    }


def _explained(prefixes: AuditedPrefixes, predictions: Array) -> float:
    returns, noise = prefixes.means, prefixes.noise
    signal = float(np.var(returns)) - noise
    return 1 - (float(np.var(returns - predictions)) - noise) / signal if signal > 0 else float("nan")


def _pairs(prefixes: AuditedPrefixes, rows: Array) -> Array:
    """Count the pairs of one prompt's prefixes behind `tau` and `tau_ceiling`, float `(2, 3)`.

    The values are compared with either half of the continuations, so that they bear the ceiling's noise.
    """
    first, second = prefixes.returns[rows, ::2].mean(axis=1), prefixes.returns[rows, 1::2].mean(axis=1)
    values = prefixes.values[rows]
    of_values = np.sum([pair_counts(values, half) for half in (first, second)], axis=0)
    return np.array([of_values, pair_counts(second, first)])


def pair_counts(first: Array, second: Array) -> tuple[float, float, float]:
    """Count pairs for Kendall's tau-b: concordant minus discordant, untied in `first`, untied in `second`."""
    above = np.triu_indices(len(first), k=1)
    x, y = (np.sign(each[:, None] - each[None, :])[above] for each in (first, second))
    return float(x @ y), float(x @ x), float(y @ y)


def _tau(counts: Array) -> float:
    """Compute Kendall's tau-b (*Biometrika*, 1945) from summed `pair_counts`; 0 if one side has ties alone."""
    agreement, num_first, num_second = counts
    return float(agreement / np.sqrt(num_first * num_second)) if num_first and num_second else 0.0


def findings(figures: Mapping[str, Estimate], std_of_values: float, std_of_returns: float) -> list[str]:
    """Name the defects of a critic.

    Args:
        figures: As `CriticAudit.figures`.
        std_of_values: Standard deviation of the values.
        std_of_returns: Standard deviation of the prefixes' true values.
    """
    gain = figures["gain_over_prompt"]
    if std_of_returns == 0:
        return ["The returns differ by no more than their noise: there is nothing to predict."]
    if std_of_values < 0.02 * std_of_returns:
        return ["The values hardly vary: the critic's head is frozen, or its learning rate is too low."]
    if figures["explained_variance"].low <= 0 and figures["tau"].low <= 0:
        return [
            "The values do not predict the returns: the critic has learned too little, its values are of other tokens "
            "or another reward, or the audit has too few prompts to tell."
        ]
    if gain.high < 0:
        return ["The critic is worse than the mean return of the prompt."]
    if gain.low <= 0:
        sure = "not better" if gain.value <= 0 else "not clearly better"
        return [f"The critic is {sure} than the mean return of the prompt."]
    return []


# ---- Sampling ----


class Continuation(NamedTuple):
    """A row to sample: the prompt's row, the number of response tokens to keep, and its place in the result."""

    row: int
    cut: int
    place: tuple[int, int, int]


def draw_cuts(lengths: Array, num_cuts: int, generator: np.random.Generator) -> Array:
    """Draw the numbers of tokens that prefixes keep, one in each of `num_cuts` equal parts of a response.

    Args:
        lengths: Tokens of each response, int `(B,)`.
        num_cuts: Prefixes of each response.
        generator: Draws the place within each part.

    Returns:
        From 0 (the prompt alone) to length - 1, int `(B, num_cuts)`.
    """
    shares = (np.arange(num_cuts) + generator.random((len(lengths), num_cuts))) / num_cuts
    return np.floor(shares * np.asarray(lengths)[:, None]).astype(int)


def batches_of(cuts: Array, num_continuations: int, max_rows: int, slack: float) -> list[list[Continuation]]:
    """Batch all continuations, prefixes of about equal length together.

    Args:
        cuts: Tokens that each prefix keeps, int `(B, K)`.
        num_continuations: Continuations of each prefix.
        max_rows: Most rows of a batch.
        slack: Largest difference of `cut` in a batch: the longest prefix must fit with the longest continuation.
    """
    rows = [
        Continuation(row, int(cut), (row, index, copy))
        for (row, index), cut in np.ndenumerate(cuts)
        for copy in range(num_continuations)
    ]
    batches: list[list[Continuation]] = []
    for each in sorted(rows, key=lambda continuation: continuation.cut):
        if not batches or len(batches[-1]) == max_rows or each.cut - batches[-1][0].cut > slack:
            batches.append([])
        batches[-1].append(each)
    return batches


def prefix_prompts(rollout: Responses, rows: Sequence[Continuation]) -> Prompts:
    """Return prompt and prefix as prompts to continue, padded on the left."""
    ids, masks = rollout.query_responses, rollout.attention_mask
    kept = [slice(rollout.context_length + each.cut) for each in rows]
    parts = [ids[each.row, part][masks[each.row, part]] for each, part in zip(rows, kept, strict=True)]
    padded = pad_sequence(parts, batch_first=True, padding_side="left")
    real = pad_sequence([torch.ones_like(part) for part in parts], batch_first=True, padding_side="left")
    images = {} if rollout.images is None else {IMAGES_COLUMN: [rollout.images[each.row] for each in rows]}
    return Prompts(padded, real.bool(), images)


def joined(rollout: Responses, rows: Sequence[Continuation], sampled: Tensor, width: int, filling: int) -> Tensor:
    """Put prefixes and sampled continuations together, long `(B, width)`.

    Args:
        rollout: The responses that the prefixes are of.
        rows: The prefixes.
        sampled: Ids of the continuations, long `(B, T)`.
        width: Longest response; a continuation is cut there.
        filling: Fills the columns behind a continuation.
    """
    whole = torch.full((len(rows), width), filling, dtype=torch.long, device=sampled.device)
    for index, each in enumerate(rows):
        behind = sampled[index, : width - each.cut]
        whole[index, : each.cut] = rollout.responses[each.row, : each.cut]
        whole[index, each.cut : each.cut + len(behind)] = behind
    return whole


def prompt_keys(rollout: Responses) -> list[int]:
    """Return a number for each row that is the same for rows with the same prompt."""
    prompts, real = rollout.query_responses[:, : rollout.context_length].cpu().numpy(), rollout.masks.attention
    return [zlib.crc32(ids[mask[: len(ids)]].tobytes()) for ids, mask in zip(prompts, real, strict=True)]


def columns_of(rollout: Rollout, cuts: Array, returns: Array) -> Tensor:
    """Return the columns of each prefix that `prefixes_of` reads, float64 `(B, K, 3 + M)`.

    They are prompt, value, the prompt's mean return, and M returns.

    Args:
        rollout: The responses, with values `(B, T)`.
        cuts: Tokens that each prefix keeps, int `(B, K)`.
        returns: Monte Carlo returns of the prompt alone, then of each prefix, `(B, 1 + K, M)`.
    """
    device, places = rollout.values.device, sent(torch.as_tensor(cuts), rollout.values.device)
    of_prompt, of_prefixes = np.split(returns, [1], axis=1)
    keys = torch.tensor(prompt_keys(rollout), dtype=torch.float64, device=device)
    means = torch.as_tensor(of_prompt.mean(axis=2).repeat(cuts.shape[1], axis=1), device=device)
    columns = (keys[:, None].expand(*cuts.shape), rollout.values.double().gather(1, places), means)
    return torch.cat((torch.stack(columns, dim=2), torch.as_tensor(of_prefixes, device=device)), dim=2)


def prefixes_of(columns: Tensor) -> AuditedPrefixes:
    """Make prefixes of the gathered `columns_of` all rows; those with an unscored continuation are left out."""
    rows = columns.flatten(0, 1).cpu().numpy()
    rows = rows[np.isfinite(rows[:, 2:]).all(axis=1)]
    _, prompts = np.unique(rows[:, 0], return_inverse=True)
    return AuditedPrefixes(prompts, rows[:, 1], rows[:, 2], rows[:, 3:])


def check_audit(args: PPOConfig, prompts: Any, num_prefixes: int, num_continuations: int, has_episodes: bool) -> None:
    """Raise a `ValueError` for an audit without prompts, with too small numbers, other units, or environments."""
    problems = {
        "eval_dataset=None: an audit needs held-out prompts": prompts is None,
        "an audit continues prefixes of responses, which tools and environments cannot": has_episodes,
        f"num_prefixes={num_prefixes} must be at least 2": num_prefixes < 2,
        f"num_continuations={num_continuations} must be at least 4": num_continuations < 4,
        "whiten_rewards=True: values in the unit of each batch cannot be compared with returns": args.whiten_rewards,
    }
    if found := [problem for problem, is_one in problems.items() if is_one]:
        raise ValueError(found[0])
