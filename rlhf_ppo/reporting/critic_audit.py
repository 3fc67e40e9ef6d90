"""Critic audit: the value model against Monte Carlo returns of prefixes of responses.

Kazemnejad et al., *VinePPO*, arXiv 2410.01679, section 7, measure a critic like this: cut a response, sample
continuations of the prefix from the policy, and compare the mean of their returns with the value at the cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.files import optional, write_json
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
        values = {f"critic/{name}": estimate.value for name, estimate in self.figures.items()}
        return values | {"critic/gain_over_prompt_low": self.figures["gain_over_prompt"].low}

    @optional("The critic's audit")
    def save(self, directory: str | Path) -> None:
        """Write `critic_audit.json`."""
        content = asdict(self) | {"figures": {name: estimate._asdict() for name, estimate in self.figures.items()}}
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
            rows = np.concatenate([rows_of[prompt] for prompt in chosen])
            copies = np.repeat(np.arange(len(chosen)), [len(rows_of[prompt]) for prompt in chosen])
            drawn.append(_figures(prefixes.take(rows, copies), pairs[chosen].sum(axis=0)))
    figures = {}
    for name, value in of_all.items():
        values = np.array([sample[name] for sample in drawn])
        values = values[np.isfinite(values)]
        low, high = np.quantile(values, (0.025, 0.975)) if np.isfinite(value) and len(values) else (np.nan, np.nan)
        figures[name] = Estimate(value, float(low), float(high))
    signal = max(float(np.var(prefixes.means)) - prefixes.noise, 0.0)  # variance of the prefixes' true values
    problems = findings(figures, float(np.std(prefixes.values)), signal**0.5)
    num_prefixes, num_continuations = prefixes.returns.shape
    return CriticAudit(figures, len(prompts), num_prefixes, num_continuations, problems)


def _figures(prefixes: AuditedPrefixes, pairs: Array) -> dict[str, float]:
    _, group = np.unique(prefixes.prompts, return_inverse=True)
    of_prompt = (np.bincount(group, prefixes.prompt_means) / np.bincount(group))[group]
    of_values, of_baseline = (_explained(prefixes, predicted) for predicted in (prefixes.values, of_prompt))
    tau, ceiling = map(_tau, pairs)
    return {
        "explained_variance": of_values,
        "explained_variance_of_prompt": of_baseline,
        "gain_over_prompt": of_values - of_baseline,
        "tau": tau,
        "tau_ceiling": ceiling,
    }


def _explained(prefixes: AuditedPrefixes, predictions: Array) -> float:
    returns, noise = prefixes.means, prefixes.noise
    signal = float(np.var(returns)) - noise
    return 1 - (float(np.var(returns - predictions)) - noise) / signal if signal > 0 else float("nan")


def _pairs(prefixes: AuditedPrefixes, rows: Array) -> Array:
    """Count the pairs of one prompt's prefixes behind `tau` and `tau_ceiling`, float `(2, 3)`.

    Values are compared with each half of the continuations separately: `tau` has the same noise as its ceiling.
    """
    first, second = prefixes.returns[rows, ::2].mean(axis=1), prefixes.returns[rows, 1::2].mean(axis=1)
    values = prefixes.values[rows]
    of_values = np.sum([pair_counts(values, half) for half in (first, second)], axis=0)
    return np.array([of_values, pair_counts(second, first)])


def pair_counts(first: Array, second: Array) -> tuple[float, float, float]:
    """Count pairs for Kendall's tau-b: concordant minus discordant, untied in `first`, untied in `second`."""
    above = np.triu_indices(len(first), k=1)
    x, y = (np.sign(numbers[:, None] - numbers[None, :])[above] for numbers in (first, second))
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


def check_audit(
    args: PPOConfig, prompts: object, num_prefixes: int, num_continuations: int, has_episodes: bool
) -> None:
    """Raise a `ValueError` for an audit without prompts, of too few responses, in other units, or of turns."""
    problems = {
        "eval_dataset=None: an audit needs held-out prompts": prompts is None,
        "an audit continues prefixes of responses, which is impossible with tools and environments": has_episodes,
        f"num_prefixes={num_prefixes} must be at least 2": num_prefixes < 2,
        f"num_continuations={num_continuations} must be at least 4": num_continuations < 4,
        "whiten_rewards=True: values in the unit of each batch cannot be compared with returns": args.whiten_rewards,
        "gae_level='turn': an audit compares values of tokens, and only a turn's first has one": args.gae_level
        == "turn",
    }
    if present := [problem for problem, is_one in problems.items() if is_one]:
        raise ValueError(present[0])
