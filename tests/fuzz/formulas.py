"""The equations of an update, for every option: float64 NumPy, from the papers and docs/algorithm.md.

Rows are lists of one array per response, of the policy's own tokens, without padding and masks. Of the package only
the defaults of options are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace

import numpy as np

from rlhf_ppo import PPOConfig
from tests.fuzz.options import Configuration
from tests.oracles import Array, Episode

Rows = list[Array]
"""One array of the policy's tokens per response."""

EOS = 1


class Settings(SimpleNamespace):
    """The options that enter the formulas, with the defaults of the package; what is off changes nothing."""

    @classmethod
    def of(cls, options: Configuration) -> Settings:
        off = {"score_clip": math.inf, "missing_eos_penalty": 0.0, "stop_strings": []}
        return cls(**{each.name: each.default for each in fields(PPOConfig)} | off | options)

    @property
    def clips(self) -> tuple[float, float]:
        """How far the ratio may fall and rise."""
        return self.cliprange, self.cliprange if self.cliprange_high is None else self.cliprange_high

    @property
    def batch_size(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def num_updates(self) -> int:
        return self.total_episodes // self.batch_size

    def rate(self, update: int) -> float:
        """Share of the learning rate in an update."""
        total = self.num_updates
        warmup, kind = int(self.warmup_steps), self.lr_scheduler_type
        if kind != "constant" and update < warmup:
            return update / warmup
        progress = (update - warmup) / max(1, total - warmup)
        return {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}.get(kind, 1.0)


def cut(flat: Array, like: Sequence[Episode]) -> Rows:
    """Cut figures of tokens that follow each other into rows."""
    return np.split(np.asarray(flat, dtype=float), np.cumsum([len(episode.own) for episode in like])[:-1])


# ---- An episode ----


def word(token: int) -> str:
    return ["<pad>", "<eos>", "<bos>"][token] if token < 3 else f"w{token - 3}"


def sampled_episode(prompt: list[int], sampled: list[int], settings: Settings) -> Episode:
    """A response that is cut after what ends it."""
    stop, text = stop_of(settings), ""
    for place, token in enumerate(sampled):
        text = f"{text} {word(token)}"
        if token == stop or any(string in text for string in settings.stop_strings):
            return Episode(prompt, sampled[: place + 1], True)
    return Episode(prompt, sampled, end_of(settings) in sampled)


def stop_of(settings: Settings) -> int | None:
    return EOS if settings.stop_token == "eos" else settings.stop_token_id


def end_of(settings: Settings) -> int | None:
    """The token that counts as an end: EOS where neither a stop token nor a stop string is set."""
    return EOS if stop_of(settings) is None and not settings.stop_strings else stop_of(settings)


def ended_in_turns(episode: Episode, settings: Settings) -> Episode:
    """The same response; it has stopped if the policy's last turn holds what ends it."""
    turns = turns_of(episode)
    last = [episode.response[place] for place in turns[-1]]
    text = " ".join(word(token) for token in last)
    stopped = end_of(settings) in last or any(string in text for string in settings.stop_strings)
    return Episode(episode.prompt, episode.response, stopped, episode.written)


def turns_of(episode: Episode) -> list[list[int]]:
    """Places of the response's tokens, turn by turn of the policy."""
    turns: list[list[int]] = []
    for place in episode.own:
        if turns and turns[-1][-1] == place - 1:
            turns[-1].append(place)
        else:
            turns.append([place])
    return turns


def allowed(probabilities: Array, settings: Settings) -> Array:
    """Which tokens may be sampled, with a little room for what is at the border in float32."""
    near, order = 1e-5, np.sort(probabilities, axis=-1)[:, ::-1]
    least = np.zeros(len(probabilities))
    if settings.top_k:
        least = np.maximum(least, order[:, settings.top_k - 1])
    kept = np.where(probabilities >= least[:, None] * (1 - near), probabilities, 0.0)
    kept /= kept.sum(axis=-1, keepdims=True)
    if settings.top_p < 1:  # the smallest set of the likeliest whose sum is at least p
        order = np.sort(kept, axis=-1)[:, ::-1]
        before = np.cumsum(order, axis=-1) - order
        least = np.where(before < settings.top_p + near, order, np.inf).min(axis=-1)
        kept = np.where(kept >= least[:, None] * (1 - near), kept, 0.0)
    if settings.min_p is not None:
        kept = np.where(kept >= settings.min_p * kept.max(axis=-1, keepdims=True) * (1 - near), kept, 0.0)
    return kept > 0


# ---- Rewards and advantages ----


@dataclass
class Known:
    """What is known of an update before its first step; a score is NaN where there is none."""

    episodes: list[Episode]
    logprobs: Rows
    ref_logprobs: Rows | None
    values: Rows
    final_values: Array
    by_source: dict[str, Array]
    scores: Array
    kl: Rows
    advantages: Rows
    returns: Rows
    weights: Rows
    says: Rows | None
    coef: float

    @property
    def scored(self) -> list[int]:
        return [row for row, score in enumerate(self.scores) if not np.isnan(score)]


def kl_of(logprobs: Array, ref_logprobs: Array, estimator: str) -> Array:
    difference = logprobs - ref_logprobs
    return difference if estimator == "k1" else np.exp(-difference) - 1 + difference


def whitened(rows: Rows, counted: list[int], keeps_mean: bool) -> Rows:
    """`(x - mean) / sqrt(var + 1e-8)` over the tokens of the counted rows; 0 elsewhere."""
    tokens = np.concatenate([rows[row] for row in counted]) if counted else np.zeros(0)
    mean = tokens.mean() if len(tokens) else 0.0
    variance = tokens.var(ddof=1) if len(tokens) > 1 else 0.0
    scaled = [(row - mean) / np.sqrt(variance + 1e-8) + keeps_mean * mean for row in rows]
    return [row if number in counted else 0 * row for number, row in enumerate(scaled)]


def discounted(rewards: Array, values: Array, end: float, gamma: float, lam: float) -> Array:
    """`A_t = sum_l (gamma lam)^l delta_{t+l}` with `delta_t = r_t + gamma V_{t+1} - V_t`."""
    delta = rewards + gamma * np.append(values[1:], end) - values
    steps = np.arange(len(delta))
    return np.array([(float(gamma * lam) ** (steps[t:] - t) * delta[t:]).sum() for t in steps])


def learned_places(episode: Episode, settings: Settings) -> list[int]:
    """Which of the policy's tokens the value model learns at: all, or the first ones of turns."""
    if settings.gae_level == "token":
        return list(range(len(episode.own)))
    return list(np.cumsum([0] + [len(turn) for turn in turns_of(episode)])[:-1])


def advantages_of(
    episode: Episode, rewards: Array, values: Array, end: float, settings: Settings, warms_up: bool
) -> tuple[Array, Array]:
    """Advantages before whitening, and returns; those of turns stand at their tokens, returns at the first ones."""
    starts = learned_places(episode, settings)
    actions = np.add.reduceat(rewards, starts)
    both = []
    of_policy = settings.lam if settings.lam_policy is None else settings.lam_policy
    of_critic = settings.lam if settings.lam_critic is None else settings.lam_critic
    for lam in (of_policy, 1.0 if warms_up else of_critic):
        both.append(discounted(actions, values[starts], end, settings.gamma, lam))
    lengths = np.diff([*starts, len(rewards)])
    returns = np.zeros(len(rewards))
    returns[starts] = both[1] + values[starts]
    return np.repeat(both[0], lengths), returns


# ---- Losses ----


@dataclass
class TokenLosses:
    """Figures of a mini-batch's tokens that count, `(N,)` each, and the gradients of the loss in them.

    `value_*` are of the tokens at which the value model learns.
    """

    policy_loss: Array
    ratio: Array
    clipped: Array
    log_ratio: Array
    entropy: Array
    value_loss: Array
    value_clipped: Array
    loss: float
    d_logprobs: Array
    d_entropy: Array
    d_values: Array


def losses_of(
    known: Known, rows: list[int], logprobs: Array, entropies: Array, values: Array, settings: Settings, alone: bool
) -> TokenLosses:
    """Losses of a mini-batch, of those of its rows that have a score.

    Args:
        known: The update.
        rows: The mini-batch's rows that count.
        logprobs: Log-probabilities of their tokens now, row after row, `(N,)`.
        entropies: Entropies now.
        values: Values now.
        settings: The options.
        alone: Whether the value model learns alone.
    """
    of_rows = known.logprobs, known.advantages, known.weights, known.returns, known.values
    old, advantages, weights, returns, before = (np.concatenate([part[row] for row in rows]) for part in of_rows)
    lengths = [len(known.logprobs[row]) for row in rows]
    log_ratio = logprobs - old
    ratio = np.exp(log_ratio)
    gain = ratio * advantages
    if settings.policy_loss == "ppo":
        low, high = settings.clips
        safe = np.clip(ratio, 1 - low, 1 + high) * advantages
        loss, clipped = -weights * np.minimum(gain, safe), safe < gain
        slope = np.where(clipped, 0.0, -weights * gain)
    else:
        loss, clipped, slope = log_ratio**2 - gain, log_ratio > 0.1, 2 * log_ratio - gain
    shares = np.full(len(old), 1 / len(old))
    if settings.loss_aggregation == "sequence":
        shares = np.repeat([1 / (len(rows) * length) for length in lengths], lengths)
    starts = np.cumsum(lengths) - lengths
    learned = np.zeros(len(old), dtype=bool)
    for start, row in zip(starts, rows, strict=True):
        learned[start + np.array(learned_places(known.episodes[row], settings))] = True
    error, flat = (values - returns) ** 2 / 2, np.zeros(len(old), dtype=bool)
    if settings.cliprange_value is not None:
        near = np.clip(values, before - settings.cliprange_value, before + settings.cliprange_value)
        worse = (near - returns) ** 2 / 2
        error, flat = np.maximum(error, worse), worse > error
    total = (shares * loss).sum() - settings.entropy_coef * entropies.mean()
    share_of_value = settings.vf_coef / learned.sum()
    return TokenLosses(
        policy_loss=loss,
        ratio=ratio,
        clipped=clipped,
        log_ratio=log_ratio,
        entropy=entropies,
        value_loss=error[learned],
        value_clipped=flat[learned],
        loss=float(share_of_value * error[learned].sum() + (0 if alone else total)),
        d_logprobs=shares * slope,
        d_entropy=np.full(len(old), -settings.entropy_coef / len(old)),
        d_values=share_of_value * np.where(learned & ~flat, values - returns, 0.0),
    )


# ---- The optimizer ----


def norm_of(gradients: Iterable[Array]) -> float:
    return math.sqrt(sum(float((each**2).sum()) for each in gradients))


class Optimizer:
    """SGD, or AdamW (1711.05101), with a rate for each model, after clipping the norm of all gradients."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.first: dict[str, Array] = {}
        self.second: dict[str, Array] = {}
        self.count: dict[str, int] = {}

    def clipped(self, gradients: Mapping[str, Array]) -> tuple[dict[str, Array], float]:
        """The gradients with a norm of at most `max_grad_norm`, and their norm before."""
        norm, limit = norm_of(gradients.values()), self.settings.max_grad_norm
        scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        return {name: each * scale for name, each in gradients.items()}, norm

    def step(self, weights: Mapping[str, Array], gradients: Mapping[str, Array], update: int) -> dict[str, Array]:
        """Return the weights after a step; those without a gradient stay."""
        return {
            name: self._moved(name, value, gradients[name], update) if name in gradients else value
            for name, value in weights.items()
        }

    def _moved(self, name: str, weight: Array, gradient: Array, update: int) -> Array:
        settings = self.settings
        own_rate = settings.critic_learning_rate if name.startswith("value_model.") else None
        rate = settings.rate(update) * (settings.learning_rate if own_rate is None else own_rate)
        decay = 0.0 if "norm" in name or "bias" in name else settings.weight_decay
        if settings.optim == "sgd":
            return weight - rate * (gradient + decay * weight)
        one, two = settings.adam_beta1, settings.adam_beta2
        count = self.count[name] = self.count.get(name, 0) + 1
        first = self.first[name] = one * self.first.get(name, 0 * weight) + (1 - one) * gradient
        second = self.second[name] = two * self.second.get(name, 0 * weight) + (1 - two) * gradient**2
        change = first / (1 - one**count) / (np.sqrt(second / (1 - two**count)) + settings.adam_epsilon)
        return weight * (1 - rate * decay) - rate * change


# ---- Means over an update ----


def explained(known: Known, settings: Settings) -> float:
    values, returns = valued(known, settings)
    if len(returns) < 2 or returns.var() <= 1e-10 * np.mean(returns**2 + values**2):
        return 0.0
    return 1 - float((returns - values).var() / returns.var())


def valued(known: Known, settings: Settings) -> tuple[Array, Array]:
    """Values and returns at the tokens at which the value model learns, of responses with a score."""
    chosen = [(row, learned_places(known.episodes[row], settings)) for row in known.scored]
    if not chosen:
        return np.zeros(0), np.zeros(0)
    pairs = [(known.values[row][places], known.returns[row][places]) for row, places in chosen]
    return np.concatenate([each for each, _ in pairs]), np.concatenate([each for _, each in pairs])


def far(epoch: Sequence[TokenLosses]) -> float:
    """How far the policy is from where it sampled, nats per token, by k3."""
    moved = np.concatenate([each.log_ratio for each in epoch])
    return float((np.exp(moved) - 1 - moved).mean())
