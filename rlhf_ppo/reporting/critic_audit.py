"""Critic audit: the value model against Monte Carlo returns of prefixes of responses.

Kazemnejad et al., *VinePPO*, arXiv 2410.01679, section 7, measure a critic like this: cut a response, sample
continuations of the prefix from the policy, and compare the mean of their returns with the value at the cut.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_ppo.checkpoints.files import write_json
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Responses, Rollout, sent
from rlhf_ppo.reporting.run_log import AUDIT_NAME

Array = NDArray[Any]

NUM_RESAMPLES = 1000
"""Bootstrap resamples of the prompts behind each interval."""

_NUM_BINS = 5


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
        positions: Number of response tokens that the prefix keeps, int `(N,)`.
        values: The critic's value of the prefix, in the reward's unit, `(N,)`.
        previous: The value one token earlier, NaN at the start of a response, `(N,)`.
        following: The value one token later, NaN at the end of a response, `(N,)`.
        scores: The score of the prefix as it is, before shaping, NaN at the start of a response, `(N,)`.
        prompt_means: Mean return of other responses to the prompt, which share no token with the prefix, `(N,)`.
        returns: Discounted sum of the rewards behind the prefix, for each of M continuations, `(N, M)`; M >= 2.
    """

    prompts: Array
    positions: Array
    values: Array
    previous: Array
    following: Array
    scores: Array
    prompt_means: Array
    returns: Array

    def __post_init__(self) -> None:
        if self.returns.ndim != 2 or self.returns.shape[1] < 2:
            raise ValueError(f"returns has shape {self.returns.shape}; an audit needs at least 2 continuations")
        if len(np.unique(self.prompts)) < 2:
            raise ValueError("the prefixes belong to one prompt; an audit needs at least 2 prompts")

    def take(self, rows: Array, prompts: Array | None = None) -> AuditedPrefixes:
        """Return some prefixes, with other prompt indices if given."""
        columns = [getattr(self, each.name)[rows] for each in fields(self)[1:]]
        return AuditedPrefixes(self.prompts[rows] if prompts is None else prompts, *columns)

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
            `explained_variance`: of the critic, and of three baselines that do not read the response: `_of_prompt`,
            the mean return of other responses to the prompt, `_of_position`, a quadratic in the position, and
            `_of_both`, least squares on both;
            `_turned`, of the values with the other sign.
            `gain_over_prompt`, `_position`, `_both`: the critic's explained variance minus a baseline's.
            `tau`: Kendall's tau-b between values and returns among the prefixes of one prompt; `tau_of_position`, of
            the position; `tau_of_score`, of the prefix's own score; `tau_ceiling`, between two halves of the
            continuations.
            `slope`: of the returns on the values, 1 for a calibrated critic. `bias`: mean value minus mean return.
            `previous_fits_better`, `following_fits_better`: variance of the error of the value minus that of its
            neighbour, positive if the values are a token off.
        calibration: One row per fifth of the values: number, mean value, mean return and its interval.
        by_position: One row per fifth of the positions: first and last position, number, explained variance, None
            where the true values do not differ beyond the noise.
        num_prompts: Number of prompts.
        num_prefixes: Number of prefixes.
        num_continuations: Continuations of each prefix.
        findings: What is wrong with the critic, a sentence each; empty if nothing was found.
    """

    figures: Mapping[str, Estimate]
    calibration: list[dict[str, float]]
    by_position: list[dict[str, float | None]]
    num_prompts: int
    num_prefixes: int
    num_continuations: int
    findings: list[str]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the audit, by name."""
        found = {f"critic/{name}": self.figures[name].value for name in _LOGGED}
        return found | {"critic/gain_over_prompt_low": self.figures["gain_over_prompt"].low}

    def save(self, directory: str | Path) -> None:
        """Write `critic_audit.json`."""
        content = asdict(self) | {"figures": {name: each._asdict() for name, each in self.figures.items()}}
        write_json(Path(directory, AUDIT_NAME), content)

    def __str__(self) -> str:
        get = self.figures.__getitem__
        sizes = f"{self.num_prefixes} prefixes of {self.num_prompts} prompts, {self.num_continuations} continuations"
        explained = f"explained variance {get('explained_variance')}, baseline {get('explained_variance_of_both')}"
        ranks = f"tau {get('tau')}, position alone {get('tau_of_position')}, ceiling {get('tau_ceiling')}"
        return f"Critic audit ({sizes}): {explained}; {ranks}. " + (" ".join(self.findings) or "No defect found.")


_LOGGED = (
    "explained_variance",
    "explained_variance_of_both",
    "gain_over_prompt",
    "tau",
    "tau_of_position",
    "tau_ceiling",
    "slope",
    "bias",
)


def audit(prefixes: AuditedPrefixes, seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> CriticAudit:
    """Compare values with Monte Carlo returns.

        EV(p) = 1 - (Var(G - p) - noise) / (Var(G) - noise)

    where `G` is the mean of a prefix's returns, `p` a prediction, and noise the mean of s^2 / M, which no prediction
    can explain. Intervals resample prompts with all their prefixes.

    Args:
        prefixes: Prefixes with values and returns.
        seed: Seed of the bootstrap.
        num_resamples: Number of resamples.
    """
    prompts = np.unique(prefixes.prompts)
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
    num_prefixes, num_continuations = prefixes.returns.shape
    return CriticAudit(
        figures,
        _calibration(prefixes),
        _by_position(prefixes),
        len(prompts),
        num_prefixes,
        num_continuations,
        findings(figures, float(np.std(prefixes.values)), _signal(prefixes) ** 0.5),
    )


def _figures(prefixes: AuditedPrefixes, pairs: Array) -> dict[str, float]:
    returns, values, noise = prefixes.means, prefixes.values, prefixes.noise
    of_prompt = _of_prompt(prefixes)
    scaled = prefixes.positions / max(prefixes.positions.max(), 1)
    of_position = [scaled, scaled**2]
    explained = {
        "explained_variance": _explained(returns, values, noise),
        "explained_variance_turned": _explained(returns, -values, noise),
        "explained_variance_of_prompt": _explained(returns, of_prompt, noise),
        "explained_variance_of_position": _explained(returns, _fitted(returns, of_position), noise),
        "explained_variance_of_both": _explained(returns, _fitted(returns, [of_prompt, *of_position]), noise),
    }
    own = explained["explained_variance"]
    baselines = ("prompt", "position", "both")
    gains = {f"gain_over_{name}": own - explained[f"explained_variance_of_{name}"] for name in baselines}
    variance = float(np.var(values))
    slope = float(np.cov(values, returns, bias=True)[0, 1] / variance) if variance > 0 else 0.0
    neighbours = {
        f"{name}_fits_better": _fits_better(returns, values, each)
        for name, each in (("previous", prefixes.previous), ("following", prefixes.following))
    }
    ranks = dict(zip(_RANKS, map(_tau, pairs), strict=True))
    return explained | gains | ranks | {"slope": slope, "bias": float(values.mean() - returns.mean())} | neighbours


_RANKS = ("tau", "tau_of_position", "tau_of_score", "tau_ceiling")


def _signal(prefixes: AuditedPrefixes) -> float:
    """Variance of the prefixes' true values: that of the Monte Carlo means without their sampling noise."""
    return max(float(np.var(prefixes.means)) - prefixes.noise, 0.0)


def _explained(returns: Array, predictions: Array, noise: float) -> float:
    signal = float(np.var(returns)) - noise
    return 1 - (float(np.var(returns - predictions)) - noise) / signal if signal > 0 else float("nan")


def _of_prompt(prefixes: AuditedPrefixes) -> Array:
    """Mean of `prompt_means` over the rows of a prompt."""
    _, group = np.unique(prefixes.prompts, return_inverse=True)
    return (np.bincount(group, prefixes.prompt_means) / np.bincount(group))[group]


def _fitted(returns: Array, columns: Sequence[Array]) -> Array:
    """Least squares on a constant and these columns; each prefix is fitted without itself (by its leverage)."""
    design = np.stack([np.ones_like(returns), *columns], axis=1)
    inverse = np.linalg.pinv(design)
    leverage = np.minimum((design * inverse.T).sum(axis=1), 1 - 1e-6)
    return returns - (returns - design @ (inverse @ returns)) / (1 - leverage)


def _fits_better(returns: Array, values: Array, neighbours: Array) -> float:
    """Compute `Var(G - V) - Var(G - neighbour)` over the prefixes that have this neighbour."""
    known = np.isfinite(neighbours)
    if not known.any():
        return 0.0
    returns, values, neighbours = returns[known], values[known], neighbours[known]
    return float(np.var(returns - values) - np.var(returns - neighbours))


def _pairs(prefixes: AuditedPrefixes, rows: Array) -> Array:
    """Count the pairs of one prompt's prefixes behind each of `_RANKS`, float `(4, 3)`.

    All are compared with either half of the continuations, so that they bear the ceiling's noise.
    """
    first, second = prefixes.returns[rows, ::2].mean(axis=1), prefixes.returns[rows, 1::2].mean(axis=1)
    ranked = (prefixes.values[rows], prefixes.positions[rows], prefixes.scores[rows], second)
    halves = ((first, second),) * 3 + ((first,),)
    return np.array(
        [np.sum([pair_counts(each, half) for half in of], axis=0) for each, of in zip(ranked, halves, strict=True)]
    )


def pair_counts(first: Array, second: Array) -> tuple[float, float, float]:
    """Count pairs for Kendall's tau-b: concordant minus discordant, untied in `first`, untied in `second`.

    Pairs with a NaN are left out.
    """
    known = np.isfinite(first) & np.isfinite(second)
    first, second = first[known], second[known]
    above = np.triu_indices(len(first), k=1)
    x, y = (np.sign(each[:, None] - each[None, :])[above] for each in (first, second))
    return float(x @ y), float(x @ x), float(y @ y)


def _tau(counts: Array) -> float:
    """Compute Kendall's tau-b (*Biometrika*, 1945) from summed `pair_counts`; 0 if one side has ties alone."""
    agreement, num_first, num_second = counts
    return float(agreement / np.sqrt(num_first * num_second)) if num_first and num_second else 0.0


def _calibration(prefixes: AuditedPrefixes) -> list[dict[str, float]]:
    means, rows = prefixes.means, []
    for part in np.array_split(np.argsort(prefixes.values, kind="stable"), _NUM_BINS):
        if len(part) > 1:
            margin = 1.96 * float(means[part].std(ddof=1)) / len(part) ** 0.5
            center = float(means[part].mean())
            value = float(prefixes.values[part].mean())
            row = {"prefixes": len(part), "value": value, "return": center}
            rows.append(row | {"low": center - margin, "high": center + margin})
    return rows


def _by_position(prefixes: AuditedPrefixes) -> list[dict[str, float | None]]:
    rows = []
    for part in np.array_split(np.argsort(prefixes.positions, kind="stable"), _NUM_BINS):
        if len(part) > 2:
            returns = prefixes.returns[part]
            noise = float(returns.var(axis=1, ddof=1).mean() / returns.shape[1])
            explained = _explained(returns.mean(axis=1), prefixes.values[part], noise)
            ends = {"first": int(prefixes.positions[part].min()), "last": int(prefixes.positions[part].max())}
            known = explained if math.isfinite(explained) else None
            rows.append(ends | {"prefixes": len(part), "explained_variance": known})
    return rows


def findings(figures: Mapping[str, Estimate], std_of_values: float, std_of_returns: float) -> list[str]:
    """Name the defects of a critic.

    Args:
        figures: As `CriticAudit.figures`.
        std_of_values: Standard deviation of the values.
        std_of_returns: Standard deviation of the prefixes' true values.
    """
    get: Callable[[str], Estimate] = figures.__getitem__
    if std_of_returns == 0:
        return ["The returns differ by no more than their noise: there is nothing to predict."]
    if std_of_values < 0.02 * std_of_returns:
        return ["The values hardly vary: the critic's head is frozen, or its learning rate is too low."]
    if get("explained_variance_turned").low > 0:
        return ["The values fall where the returns rise: the sign is flipped."]
    knows_nothing = get("explained_variance").low <= 0 and get("tau").low <= 0
    found = []
    for side in ("previous", "following"):
        if not knows_nothing and get(f"{side}_fits_better").low > 0:
            found.append(f"The values are a token off: the {side} token's value fits the returns better.")
    if knows_nothing:
        found.append(
            "The values do not predict the returns: the critic has learned too little, its values are of other tokens "
            "or another reward, or the audit has too few prompts to tell."
        )
    elif not found and get("gain_over_prompt").high < 0:
        found.append("The critic is worse than the mean return of the prompt.")
    elif not found and get("gain_over_prompt").low <= 0:
        sure = "not better" if get("gain_over_prompt").value <= 0 else "not clearly better"
        found.append(f"The critic is {sure} than the mean return of the prompt.")
    is_off = get("bias").low > 0 or get("bias").high < 0
    if abs(get("bias").value) > 0.5 * std_of_returns and is_off:
        error = f"{get('bias').value:+.3g}"
        found.append(f"The mean value is {error} off: the critic learned another reward, or lags behind.")
    return found


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
    return Prompts(padded, real.bool(), {})


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


def columns_of(rollout: Rollout, cuts: Array, scores: Array, returns: Array) -> Tensor:
    """Return the columns of each prefix that `prefixes_of` reads, float64 `(B, K, 7 + M)`.

    They are prompt, position, value, previous and following value, score, the prompt's mean return, and M returns.

    Args:
        rollout: The responses, with values `(B, T)`.
        cuts: Tokens that each prefix keeps, int `(B, K)`.
        scores: Score of each prefix, `(B, K)`.
        returns: Monte Carlo returns of the prompt alone, then of each prefix, `(B, 1 + K, M)`.
    """
    of_prompt, of_prefixes = np.split(returns, [1], axis=1)
    keys = torch.tensor(prompt_keys(rollout), dtype=torch.float64, device=rollout.values.device)
    values = rollout.values.double().masked_fill(~rollout.response_mask, torch.nan)
    nothing, places = torch.full_like(values[:, :1], torch.nan), sent(torch.as_tensor(cuts), values.device)
    neighbours = torch.cat((nothing, values[:, :-1]), dim=1), torch.cat((values[:, 1:], nothing), dim=1)
    columns = [keys[:, None].expand(*cuts.shape), places.double()]
    columns += [each.gather(1, places) for each in (values, *neighbours)]
    for each in (scores, of_prompt.mean(axis=2).repeat(cuts.shape[1], axis=1)):
        columns.append(torch.as_tensor(each, device=values.device))
    return torch.cat((torch.stack(columns, dim=2), torch.as_tensor(of_prefixes, device=values.device)), dim=2)


def prefixes_of(columns: Tensor) -> AuditedPrefixes:
    """Make prefixes of the gathered `columns_of` all rows; those with an unscored continuation are left out.

    Raises:
        ValueError: No prefix is left, or those of one prompt.
    """
    rows = columns.flatten(0, 1).cpu().numpy()
    parts: list[Array] = list(rows[:, :7].T)
    keys, positions = parts[:2]
    _, prompts = np.unique(keys, return_inverse=True)
    scored = np.isfinite(rows[:, 6:]).all(axis=1)
    arrays = (prompts, positions.astype(int), *parts[2:], rows[:, 7:])
    return AuditedPrefixes(*(each[scored] for each in arrays))


def check_audit(
    args: PPOConfig, num_prefixes: int = 4, num_continuations: int = 16, has_episodes: bool = False
) -> None:
    """Raise a `ValueError` if a number is too small, the unit of values is not the reward's, or environments play."""
    if has_episodes:
        raise ValueError(
            "an audit continues prefixes of responses, which tools and environments cannot: leave out "
            f"critic_audit_steps={args.critic_audit_steps} and audit_critic()"
        )
    if num_prefixes < 2:
        raise ValueError(f"num_prefixes={num_prefixes} ranks nothing; use at least 2 prefixes of each response")
    if num_continuations < 4:
        raise ValueError(
            f"num_continuations={num_continuations} is too few for the ranking's ceiling, which compares two halves; "
            "use at least 4"
        )
    if args.whiten_rewards:
        raise ValueError(
            "whiten_rewards=True: the value model learns in the unit of each batch, so its values cannot be compared "
            "with returns; audit a run without whiten_rewards"
        )
