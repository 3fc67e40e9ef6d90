"""PPO once more, in float64 NumPy: a Llama, and every formula up to the loss and the logged numbers.

It shares nothing with the package: rows are plain lists of ids without padding or masks, advantages are explicit sums
instead of a recursion, means run over concatenated tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


@dataclass(frozen=True)
class Episode:
    """A prompt and the response to it, the stop token included, as ids.

    `written` tells which tokens of the response the policy wrote; None says all of them.
    """

    prompt: list[int]
    response: list[int]
    ended: bool
    written: list[bool] | None = None

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.response

    @property
    def own(self) -> list[int]:
        """Places in the response of the tokens that the policy wrote."""
        return [place for place in range(len(self.response)) if self.written is None or self.written[place]]


@dataclass(frozen=True)
class Settings:
    """The arguments that enter the formulas."""

    temperature: float = 1.0
    kl_coef: float = 0.05
    kl_estimator: str = "k1"
    missing_eos_penalty: float = 0.0
    missing_eos_score: float | None = None
    score_clip: float | None = None
    whiten_rewards: bool = False
    bootstrap_truncated: bool = False
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1


def weights_of(model: Any) -> dict[str, Array]:
    """Every parameter of a torch module, in float64."""
    return {name: value.detach().double().cpu().numpy().copy() for name, value in model.named_parameters()}


# ---- Llama ----


@dataclass(frozen=True)
class Llama:
    """The forward pass of `LlamaForCausalLM` and `LlamaForSequenceClassification` on one row."""

    num_layers: int
    num_heads: int
    num_key_value_heads: int
    eps: float
    theta: float

    @classmethod
    def of(cls, config: Any) -> Llama:
        return cls(
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.rms_norm_eps,
            config.rope_parameters["rope_theta"],
        )

    def states(self, weights: Weights, ids: Sequence[int]) -> Array:
        """Last hidden states, `(L, H)`."""
        x = weights["model.embed_tokens.weight"][list(ids)]
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            x = x + self._attention(weights, prefix, self._norm(x, weights[f"{prefix}input_layernorm.weight"]))
            h = self._norm(x, weights[f"{prefix}post_attention_layernorm.weight"])
            gate, up = h @ weights[f"{prefix}mlp.gate_proj.weight"].T, h @ weights[f"{prefix}mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{prefix}mlp.down_proj.weight"].T
        return self._norm(x, weights["model.norm.weight"])

    def _norm(self, x: Array, weight: Array) -> Array:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.eps) * weight

    def _attention(self, weights: Weights, prefix: str, x: Array) -> Array:
        def heads(name: str, num_heads: int) -> Array:
            projected = x @ weights[f"{prefix}self_attn.{name}.weight"].T
            return projected.reshape(len(x), num_heads, -1).transpose(1, 0, 2)

        group = self.num_heads // self.num_key_value_heads
        q = self._rotate(heads("q_proj", self.num_heads))
        k = self._rotate(heads("k_proj", self.num_key_value_heads)).repeat(group, axis=0)
        v = heads("v_proj", self.num_key_value_heads).repeat(group, axis=0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        scores = np.where(np.tril(np.ones((len(x), len(x)), dtype=bool)), scores, -np.inf)
        mixed = np.exp(log_softmax(scores)) @ v
        return mixed.transpose(1, 0, 2).reshape(len(x), -1) @ weights[f"{prefix}self_attn.o_proj.weight"].T

    def _rotate(self, x: Array) -> Array:
        half = x.shape[-1] // 2
        angles = np.arange(x.shape[1])[:, None] * self.theta ** (-np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def response(self, weights: Weights, episode: Episode, temperature: float) -> tuple[Array, Array]:
        """Log-probabilities of the policy's tokens and entropies of the distributions they came from, `(T,)`."""
        before = self.states(weights, episode.ids)[len(episode.prompt) - 1 : -1]
        distribution = log_softmax(before @ weights["lm_head.weight"].T / temperature)
        logprobs = distribution[np.arange(len(episode.response)), episode.response]
        entropies = -(np.exp(distribution) * distribution).sum(axis=-1)
        return logprobs[episode.own], entropies[episode.own]

    def values(self, weights: Weights, episode: Episode) -> Array:
        """Values before each token of the policy, and after the last token of all, `(T + 1,)`."""
        values = (self.states(weights, episode.ids) @ weights["score.weight"].T)[len(episode.prompt) - 1 :, 0]
        return values[[*episode.own, -1]]

    def score(self, weights: Weights, ids: Sequence[int]) -> float:
        """What the sequence-classification head says at the last token."""
        return float((self.states(weights, ids)[-1] @ weights["score.weight"].T)[0])


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


# ---- Advantages ----


@dataclass(frozen=True)
class Estimates:
    """What is known before the first optimizer step; each list has one `(T,)` array per episode."""

    logprobs: list[Array]
    ref_logprobs: list[Array]
    values: list[Array]
    final_values: list[float]
    scores: list[float]
    kl: list[Array]
    non_score_reward: list[Array]
    rewards: list[Array]
    advantages: list[Array]
    returns: list[Array]


def estimate(
    llama: Llama,
    episodes: Sequence[Episode],
    policy: Weights,
    reference: Weights,
    value_model: Weights,
    scores: Sequence[float],
    settings: Settings,
    token_scores: Sequence[Array] | None = None,
) -> Estimates:
    """Everything from log-probabilities to whitened advantages; `scores` are before the missing-EOS penalty.

    `token_scores` are rewards of the policy's single tokens.
    """
    token_scores = [np.zeros(len(episode.own)) for episode in episodes] if token_scores is None else token_scores
    logprobs = [llama.response(policy, episode, settings.temperature)[0] for episode in episodes]
    ref_logprobs = [llama.response(reference, episode, settings.temperature)[0] for episode in episodes]
    all_values = [llama.values(value_model, episode) for episode in episodes]
    values, final = [row[:-1] for row in all_values], [float(row[-1]) for row in all_values]
    paid = [_paid(score, episode, settings) for score, episode in zip(scores, episodes, strict=True)]
    kl = [_kl(new, ref, settings.kl_estimator) for new, ref in zip(logprobs, ref_logprobs, strict=True)]
    charged = [-settings.kl_coef * row for row in kl]
    rewards = [
        row + tokens + score * (np.arange(len(row)) == len(row) - 1)
        for row, score, tokens in zip(charged, paid, token_scores, strict=True)
    ]
    paid = [score + float(tokens.sum()) for score, tokens in zip(paid, token_scores, strict=True)]
    if settings.whiten_rewards:
        mean = np.concatenate(rewards).mean()
        rewards = [row + mean for row in _whiten(rewards)]
    ends = [
        value if settings.bootstrap_truncated and not episode.ended else 0.0
        for value, episode in zip(final, episodes, strict=True)
    ]
    advantages = [
        _gae(reward, value, end, settings.gamma, settings.lam)
        for reward, value, end in zip(rewards, values, ends, strict=True)
    ]
    returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
    return Estimates(logprobs, ref_logprobs, values, final, paid, kl, charged, rewards, _whiten(advantages), returns)


def _paid(score: float, episode: Episode, settings: Settings) -> float:
    if not episode.ended and settings.missing_eos_score is not None:
        return settings.missing_eos_score
    limit = np.inf if settings.score_clip is None else settings.score_clip
    return min(max(score, -limit), limit) - (0.0 if episode.ended else settings.missing_eos_penalty)


def _kl(logprobs: Array, ref_logprobs: Array, estimator: str) -> Array:
    if estimator == "k1":
        return logprobs - ref_logprobs
    return np.exp(ref_logprobs - logprobs) - 1 - (ref_logprobs - logprobs)


def _whiten(rows: Sequence[Array]) -> list[Array]:
    tokens = np.concatenate(rows)
    return [(row - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) for row in rows]


def _gae(rewards: Array, values: Array, end: float, gamma: float, lam: float) -> Array:
    """`A_t = sum_l (gamma lam)^l delta_{t+l}`, the definition."""
    delta = rewards + gamma * np.append(values[1:], end) - values
    steps = np.arange(len(delta))
    return np.array([((gamma * lam) ** (steps[t:] - t) * delta[t:]).sum() for t in steps])


# ---- Losses and metrics ----


@dataclass(frozen=True)
class Step:
    """One optimizer step: the weights before it and the episodes of its micro-batches, by index."""

    policy: Weights
    value_model: Weights
    micro_batches: list[list[int]]

    @property
    def rows(self) -> list[int]:
        return [row for micro_batch in self.micro_batches for row in micro_batch]


@dataclass(frozen=True)
class Tokens:
    """Per-token figures of some episodes at one moment, concatenated `(N,)`."""

    policy_loss: Array
    value_loss: Array
    ratio: Array
    policy_clipped: Array
    value_clipped: Array
    log_ratio: Array
    entropy: Array


def token_figures(
    llama: Llama,
    episodes: Sequence[Episode],
    known: Estimates,
    rows: Sequence[int],
    policy: Weights,
    value_model: Weights,
    settings: Settings,
) -> Tokens:
    """What the given weights say about the episodes `rows`."""
    spoken = [llama.response(policy, episodes[row], settings.temperature) for row in rows]
    log_ratio = np.concatenate([new - known.logprobs[row] for (new, _), row in zip(spoken, rows, strict=True)])
    values = np.concatenate([llama.values(value_model, episodes[row])[:-1] for row in rows])
    advantages, returns, old_values = (
        np.concatenate([per_row[row] for row in rows]) for per_row in (known.advantages, known.returns, known.values)
    )
    ratio = np.exp(log_ratio)
    gains = ratio * advantages, np.clip(ratio, 1 - settings.cliprange, 1 + settings.cliprange) * advantages
    near = old_values + np.clip(values - old_values, -settings.cliprange_value, settings.cliprange_value)
    errors = (values - returns) ** 2 / 2, (near - returns) ** 2 / 2
    return Tokens(
        policy_loss=-np.minimum(*gains),
        value_loss=np.maximum(*errors),
        ratio=ratio,
        policy_clipped=gains[1] < gains[0],
        value_clipped=errors[1] > errors[0],
        log_ratio=log_ratio,
        entropy=np.concatenate([entropy for _, entropy in spoken]),
    )


def total_loss(tokens: Tokens, settings: Settings) -> float:
    """Policy loss and value loss of a mini-batch, each the mean over its tokens."""
    return float(tokens.policy_loss.mean() + settings.vf_coef * tokens.value_loss.mean())


def own_ids(episode: Episode) -> list[tuple[int, int]]:
    """The tokens that the policy wrote, with their places."""
    return [(place, episode.response[place]) for place in episode.own]


def metrics(
    llama: Llama,
    episodes: Sequence[Episode],
    known: Estimates,
    steps: Sequence[Step],
    by_source: Mapping[str, Sequence[float]],
    settings: Settings,
) -> dict[str, float]:
    """Every logged number of the update that does not come from a clock or the scheduler, and Trainer's `loss`."""
    num_episodes = len(episodes)
    lengths = [len(episode.own) for episode in episodes]
    ended = sum(episode.ended for episode in episodes)
    values, returns = np.concatenate(known.values), np.concatenate(known.returns)
    charged = np.concatenate(known.non_score_reward).sum() / num_episodes
    of_steps = [
        token_figures(llama, episodes, known, step.rows, step.policy, step.value_model, settings) for step in steps
    ]
    ratios = [
        token_figures(llama, episodes, known, rows, step.policy, step.value_model, settings).ratio.mean()
        for step in steps
        for rows in step.micro_batches
    ]

    def mean(figure: Callable[[Tokens], Array]) -> float:
        return float(np.concatenate([figure(tokens) for tokens in of_steps]).mean())

    sources = {}
    for name, scores in by_source.items():
        sources[f"rewards/{name}/mean"] = float(np.mean(scores))
        sources[f"rewards/{name}/std"] = float(np.std(scores, ddof=1))
    return {
        "objective/kl": np.concatenate(known.kl).sum() / num_episodes,
        "objective/entropy": -np.concatenate(known.logprobs).sum() / num_episodes,
        "objective/non_score_reward": charged,
        "objective/scores": float(np.mean(known.scores)),
        "objective/rlhf_reward": float(np.mean(known.scores)) + charged,
        "policy/approxkl_avg": mean(lambda tokens: tokens.log_ratio**2 / 2),
        "policy/clipfrac_avg": mean(lambda tokens: tokens.policy_clipped),
        "policy/entropy_avg": mean(lambda tokens: tokens.entropy),
        "loss/policy_avg": mean(lambda tokens: tokens.policy_loss),
        "loss/value_avg": mean(lambda tokens: tokens.value_loss),
        "val/clipfrac_avg": mean(lambda tokens: tokens.value_clipped),
        "val/ratio": mean(lambda tokens: tokens.ratio),
        "val/ratio_var": float(np.var(ratios, ddof=1)) if len(ratios) > 1 else 0.0,
        "val/first_logratio": 0.0,  # by definition: the policy has not moved
        "val/num_eos_tokens": ended,
        "val/explained_variance": 1 - float((returns - values).var() / returns.var()),
        "val/values_mean": values.mean(),
        "val/values_min": values.min(),
        "val/values_max": values.max(),
        "val/returns_mean": returns.mean(),
        "response/length_mean": float(np.mean(lengths)),
        "response/length_min": min(lengths),
        "response/length_max": max(lengths),
        "response/ended_frac": ended / num_episodes,
        "response/unique_frac": len({tuple(own_ids(episode)) for episode in episodes}) / num_episodes,
        "loss": float(np.mean([total_loss(tokens, settings) for tokens in of_steps])),
        **sources,
    }
