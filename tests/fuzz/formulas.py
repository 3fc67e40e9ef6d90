"""The equations of an update, for every option: float64 NumPy, from the papers and docs/algorithm.md.

Rows are lists of one array per response, of the policy's own tokens, without padding and masks. Of the package only
the defaults of options are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhf_ppo import PPOConfig
from tests.fuzz.options import Configuration
from tests.oracles import Array, Episode, log_softmax

Rows = list[Array]
"""One array of the policy's tokens per response."""

EOS = 1


class Settings(SimpleNamespace):
    """The options that enter the formulas, with the defaults of the package; what is off changes nothing."""

    @classmethod
    def of(cls, options: Configuration) -> Settings:
        off = {"score_clip": math.inf, "missing_eos_penalty": 0.0, "critic_warmup_explained_variance": math.inf}
        off |= {"stop_strings": [], "lr_scheduler_kwargs": {}, "cliprange": None}  # which gspo has its own
        return cls(**{each.name: each.default for each in fields(PPOConfig)} | off | options)

    @property
    def clips(self) -> tuple[float, float]:
        """How far the ratio may fall and rise."""
        if self.policy_loss == "gspo" and self.cliprange is None and self.cliprange_high is None:
            return 3e-4, 4e-4
        low = 0.2 if self.cliprange is None else self.cliprange
        return low, low if self.cliprange_high is None else self.cliprange_high

    @property
    def batch_size(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def num_updates(self) -> int:
        return self.total_episodes // self.batch_size

    def rate(self, update: int) -> float:
        """Share of the learning rate in an update."""
        total = self.num_updates
        steps = self.warmup_steps if self.warmup_ratio is None else self.warmup_ratio
        warmup = math.ceil(total * steps) if steps < 1 else int(steps)
        kind = self.lr_scheduler_type
        if kind != "constant" and update < warmup:
            return update / warmup
        progress = (update - warmup) / max(1, total - warmup)
        cycles = self.lr_scheduler_kwargs.get("num_cycles", 0.5)
        return {
            "linear": 1 - progress,
            "cosine": max(0.0, (1 + math.cos(2 * math.pi * cycles * progress)) / 2),
            "constant": 1.0,
            "constant_with_warmup": 1.0,
        }[kind]


def cut(flat: Array, like: Sequence[Episode]) -> Rows:
    """Cut figures of tokens that follow each other into rows."""
    return np.split(np.asarray(flat, dtype=float), np.cumsum([len(episode.own) for episode in like])[:-1])


# ---- What a value model says ----


def edges_of(low: float, high: float, num_bins: int) -> Array:
    return np.linspace(low, high, num_bins + 1)


def head_values(outputs: Array, edges: Array, settings: Settings) -> Array:
    """The value of each head, `(N, num_heads)`, from what the heads say, `(N, num_heads * num_bins)`."""
    by_head = outputs.reshape(len(outputs), settings.critic_ensemble, -1)
    if settings.value_loss == "mse":
        return by_head[..., 0]
    return np.exp(log_softmax(by_head)) @ ((edges[1:] + edges[:-1]) / 2)


def widened(low: float, high: float, returns: Array) -> tuple[float, float]:
    """A range that covers all returns; where it grows, with a tenth of it as room."""
    if len(returns) == 0 or (low < high and low <= returns.min() and returns.max() <= high):
        return low, high
    is_new = low == high
    ends = (returns.min(), returns.max()) if is_new else (min(low, returns.min()), max(high, returns.max()))
    room = max(0.1 * (ends[1] - ends[0]), 1e-3)
    grows = (is_new or returns.min() < low, is_new or returns.max() > high)
    return (ends[0] - room if grows[0] else low), (ends[1] + room if grows[1] else high)


def hl_gauss(logits: Array, returns: Array, edges: Array) -> tuple[Array, Array]:
    """Cross-entropies with Gaussians around the returns, cut off at the range, and their gradients in the logits."""
    width = edges[1] - edges[0]
    inside = np.clip(returns, edges[0], edges[-1])
    below = np.vectorize(math.erf)((edges - inside[:, None]) / (0.75 * width * math.sqrt(2)))
    mass = np.diff(below, axis=1) / (below[:, -1:] - below[:, :1])
    log_probabilities = log_softmax(logits)
    return -(mass * log_probabilities).sum(axis=1), np.exp(log_probabilities) - mass


def lowest(spreads: Sequence[Array], counted: list[int], share: float) -> list[Array]:
    """Which tokens are among the share with the smallest spread: not those that others equal across its border."""
    ordered = np.sort(np.concatenate([spreads[row] for row in counted])) if counted else np.zeros(1)
    border = ordered[math.floor(share * len(ordered))]
    return [(row < border) & (number in counted) for number, row in enumerate(spreads)]


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
    return Episode(prompt, sampled, stop is None and EOS in sampled)


def stop_of(settings: Settings) -> int | None:
    return EOS if settings.stop_token == "eos" else settings.stop_token_id


def ended_in_turns(episode: Episode, settings: Settings) -> Episode:
    """The same response; it has stopped if the policy's last turn holds what ends it."""
    turns = turns_of(episode)
    last = [episode.response[place] for place in turns[-1]]
    stop = EOS if stop_of(settings) is None else stop_of(settings)
    text = " ".join(word(token) for token in last)
    stopped = stop in last or any(string in text for string in settings.stop_strings)
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
    own_values: Rows
    value_spread: Rows
    edges: Array
    entropy_counts: Rows = field(default_factory=list)

    def old_logprobs(self, settings: Settings) -> Rows:
        return self.says if settings.old_logprobs == "sampling" and self.says is not None else self.logprobs

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
    adaptive = settings.length_adaptive_alpha
    of_policy = settings.lam if settings.lam_policy is None else settings.lam_policy
    if adaptive is not None:
        of_policy = max(0.0, 1 - 1 / (adaptive * len(starts)))
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

    `value_*` and `out_of_range` are of the tokens at which the value model learns.
    """

    policy_loss: Array
    ratio: Array
    clipped: Array
    log_ratio: Array
    logprobs: Array
    entropy: Array
    positive: Array
    value_loss: Array
    value_clipped: Array
    out_of_range: Array
    loss: float
    d_logprobs: Array
    d_entropy: Array
    d_outputs: Array


def policy_figures(logprobs: Rows, old: Rows, advantages: Rows, settings: Settings) -> tuple[Rows, Rows, Rows, Rows]:
    """Loss, ratio, whether it is clipped, and the derivative of the loss in the log-probability, before weights."""
    low, high = settings.clips
    figures: list[tuple[Array, Array, Array, Array]] = []
    for new, before, advantage in zip(logprobs, old, advantages, strict=True):
        ratio = np.exp(new - before)
        if settings.policy_loss == "cispo":
            weight = np.minimum(ratio, 1 + high)
            figures.append((-weight * advantage * new, ratio, np.zeros(len(new), dtype=bool), -weight * advantage))
            continue
        if settings.policy_loss == "dis":
            inside = (ratio >= 1 - low) & (ratio <= 1 + high)
            slope = np.where(inside, -ratio * advantage, 0.0)
            figures.append((slope, ratio, ~inside, slope))
            continue
        if settings.policy_loss.endswith("squared"):
            log_ratio = new - before
            loss = -advantage * ratio + log_ratio**2
            figures.append((loss, ratio, log_ratio > 0.1, -advantage * ratio + 2 * log_ratio))
            continue
        if settings.policy_loss == "gspo":
            ratio = np.full(len(new), np.exp((new - before).mean()))
        bounded = np.minimum(np.maximum(ratio, 1 - low), 1 + high)
        gain, safe = ratio * advantage, bounded * advantage
        loss, clipped = -np.minimum(gain, safe), safe < gain
        if settings.dual_clip is not None:
            beyond = (advantage < 0) & (loss > -settings.dual_clip * advantage)
            loss, clipped = np.where(beyond, -settings.dual_clip * advantage, loss), clipped | beyond
        figures.append((loss, ratio, clipped, np.where(clipped, 0.0, -gain)))
    columns: Any = [list(column) for column in zip(*figures, strict=True)]
    return columns[0], columns[1], columns[2], columns[3]


def losses_of(
    known: Known, rows: list[int], logprobs: Rows, entropies: Rows, outputs: Rows, settings: Settings, alone: bool
) -> TokenLosses:
    """Losses of a mini-batch, of those of its rows that have a score.

    Args:
        known: The update.
        rows: The mini-batch's rows that count.
        logprobs: Log-probabilities of their tokens now.
        entropies: Entropies now.
        outputs: What the value model says now.
        settings: The options.
        alone: Whether the value model learns alone.
    """
    old, episodes = [known.old_logprobs(settings)[row] for row in rows], [known.episodes[row] for row in rows]
    advantages = [known.advantages[row] for row in rows]
    loss, ratio, clipped, slope = policy_figures(logprobs, old, advantages, settings)
    if settings.policy_loss != "tests.fuzz.recording.squared":
        loss = [part * known.weights[row] for part, row in zip(loss, rows, strict=True)]
        slope = [part * known.weights[row] for part, row in zip(slope, rows, strict=True)]
    lengths = [len(part) for part in logprobs]
    num_tokens = sum(lengths)
    shares = {
        "token": [1 / num_tokens for _ in rows],
        "sequence": [1 / (len(rows) * length) for length in lengths],
        "constant": [1 / (len(rows) * settings.response_length) for _ in rows],
    }[settings.loss_aggregation]
    is_positive = [known.scores[row] > settings.positive_nll_threshold for row in rows]
    num_positive = sum(length for length, each in zip(lengths, is_positive, strict=True) if each)
    imitated = [settings.positive_nll_coef * each / max(num_positive, 1) for each in is_positive]
    total = sum(share * part.sum() for share, part in zip(shares, loss, strict=True))
    counts = [known.entropy_counts[row] for row in rows]
    in_bonus = sum((part * count).sum() for part, count in zip(entropies, counts, strict=True))
    total -= settings.entropy_coef * in_bonus / num_tokens
    total -= sum(weight * part.sum() for weight, part in zip(imitated, logprobs, strict=True))
    of_values, value_clipped, d_outputs, out_of_range, num_values = [], [], [], [], 0
    for row, episode, now in zip(rows, episodes, outputs, strict=True):
        places = learned_places(episode, settings)
        error, flat, slope_of_value = value_figures(known, row, now[places], places, settings)
        slopes = np.zeros(now.shape)
        slopes[places] = slope_of_value
        of_values.append(error)
        value_clipped.append(flat)
        d_outputs.append(slopes)
        target = known.returns[row][places]
        out_of_range.append((target < known.edges[0]) | (target > known.edges[-1]))
        num_values += len(places)
    of_value = settings.vf_coef * sum(part.sum() for part in of_values) / num_values
    d_logprobs = [share * part - weight for share, part, weight in zip(shares, slope, imitated, strict=True)]
    return TokenLosses(
        policy_loss=np.concatenate(loss),
        ratio=np.concatenate(ratio),
        clipped=np.concatenate(clipped),
        log_ratio=np.concatenate([new - before for new, before in zip(logprobs, old, strict=True)]),
        logprobs=np.concatenate(logprobs),
        entropy=np.concatenate(entropies),
        positive=np.concatenate([np.full(n, each) for n, each in zip(lengths, is_positive, strict=True)]),
        value_loss=np.concatenate(of_values),
        value_clipped=np.concatenate(value_clipped),
        out_of_range=np.concatenate(out_of_range),
        loss=float(of_value + (0 if alone else total)),
        d_logprobs=np.concatenate(d_logprobs),
        d_entropy=-settings.entropy_coef * np.concatenate(counts) / num_tokens,
        d_outputs=settings.vf_coef * np.concatenate(d_outputs) / num_values,
    )


def value_figures(
    known: Known, row: int, outputs: Array, places: list[int], settings: Settings
) -> tuple[Array, Array, Array]:
    """Loss, whether it is clipped, and gradient in all outputs, `(N, num_outputs)`, of a row's tokens.

    Only the row's own head has a gradient: the heads take turns over the rows.
    """
    own, target = row % settings.critic_ensemble, known.returns[row][places]
    slopes = np.zeros((len(places), settings.critic_ensemble, outputs.shape[1] // settings.critic_ensemble))
    said = outputs.reshape(slopes.shape)[:, own]
    flat = np.zeros(len(places), dtype=bool)
    if settings.value_loss == "hl_gauss":
        error, slopes[:, own] = hl_gauss(said, target, known.edges)
        return error, flat, slopes.reshape(outputs.shape)
    value, before = said[:, 0], known.own_values[row][places]
    error = (value - target) ** 2 / 2
    if settings.cliprange_value is not None:
        near = np.clip(value, before - settings.cliprange_value, before + settings.cliprange_value)
        worse = (near - target) ** 2 / 2
        error, flat = np.maximum(error, worse), worse > error
    slopes[:, own, 0] = np.where(flat, 0.0, value - target)
    return error, flat, slopes.reshape(outputs.shape)


# ---- The optimizer ----


def frozen(name: str, critic_freeze: str) -> bool:
    """Tell whether the value model does not learn a parameter."""
    return critic_freeze != "none" and bool(
        re.search({"attention": "self_attn"}.get(critic_freeze, critic_freeze), name)
    )


class Optimizer:
    """SGD, or AdamW (1711.05101), with a rate for each model, after clipping the norm of all gradients."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.first: dict[str, Array] = {}
        self.second: dict[str, Array] = {}
        self.count: dict[str, int] = {}

    def clipped(self, gradients: Mapping[str, Array]) -> tuple[dict[str, Array], float]:
        """The gradients with a norm of at most `max_grad_norm`, and their norm before."""
        norm, limit = (
            math.sqrt(sum(float((each**2).sum()) for each in gradients.values())),
            self.settings.max_grad_norm,
        )
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
    if len(returns) < 2 or returns.var() == 0:
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
