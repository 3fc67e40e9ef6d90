"""PPO's updates once more, for every option: float64 NumPy, from the papers' equations and docs/algorithm.md.

Nothing of the package is called. Rows are lists of one array per response, of the policy's own tokens, without padding
and masks. Of a run the simulation is given which tokens were sampled, which rows a mini-batch holds, and the weights
before each optimizer step. It computes everything else: log-probabilities and values (transformers' models in float64,
on unpadded rows), rewards, advantages, losses, gradients of tokens, gradients of weights, the step, and the log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from tests.fuzz import recording
from tests.fuzz.options import Configuration
from tests.fuzz.recording import HAVE_MODEL, REWARDS, TINY, Key, SeenStep, SeenUpdate, split
from tests.oracles import Array, Episode, log_softmax

Rows = list[Array]
"""One array of the policy's tokens per response."""

EOS = 1


@dataclass
class Settings:
    """The options that enter the formulas, with the defaults that the documentation states."""

    gradient_accumulation_steps: int
    per_device_train_batch_size: int
    num_ppo_epochs: int
    num_mini_batches: int
    response_length: int
    total_episodes: int
    learning_rate: float
    optim: str
    temperature: float
    kl_coef: float
    seed: int
    stop_token: str | None
    logging_steps: int = 1
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    stop_token_id: int | None = None
    stop_strings: list[str] = field(default_factory=list)
    num_generations: int = 1
    importance_sampling_correction: bool = True
    importance_sampling_clip_max: float = 2.0
    reward_weights: Any = None
    score_clip: float = math.inf
    score_scaling: bool = False
    score_normalization: bool = False
    missing_eos_penalty: float = 0.0
    missing_eos_score: float | None = None
    bootstrap_truncated: bool = False
    whiten_rewards: bool = False
    log_kl: bool = False
    kl_estimator: str = "k1"
    kl_target: float | None = None
    kl_horizon: float = 10_000
    kl_stop: float | None = None
    reference_ema: float | None = None
    gamma: float = 1.0
    lam: float = 0.95
    lam_policy: float | None = None
    lam_critic: float | None = None
    length_adaptive_alpha: float | None = None
    gae_level: str = "token"
    policy_loss: str = "ppo"
    cliprange: float | None = None
    cliprange_high: float | None = None
    dual_clip: float | None = None
    cliprange_value: float | None = 0.2
    vf_coef: float = 0.1
    entropy_coef: float = 0.0
    positive_nll_coef: float = 0.0
    positive_nll_threshold: float = 0.0
    ptx_coef: float = 0.0
    loss_aggregation: str = "token"
    value_head_init: str = "zero"
    critic_learning_rate: float | None = None
    critic_warmup_steps: int = 0
    critic_warmup_explained_variance: float = math.inf
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    warmup_steps: float = 0
    warmup_ratio: float | None = None
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    share_base_model: bool = False
    on_divergence: str = "stop"

    @classmethod
    def of(cls, options: Configuration) -> Settings:
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in known})

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


# ---- The models, in float64 and on unpadded rows ----


class Twins:
    """Models of the trainer's kinds, whose weights are set for each use.

    Args:
        objects: What the configuration says of models.
        shares_base: Whether value model and policy are adapters over one base.
    """

    def __init__(self, objects: Configuration, shares_base: bool) -> None:
        self.policy, self.reference = recording.stopping_policy(), recording.stopping_policy()
        self.value = recording.tiny_scorer(seed=2, **TINY)
        self.rewarding = recording.reward_model().double().eval()
        if objects["adapter"] == "lora":
            from peft import get_peft_model

            self.policy = get_peft_model(self.policy, recording.lora("CAUSAL_LM"))
            if shares_base:
                self.value = get_peft_model(self.value, recording.lora("SEQ_CLS"))
        for model in (self.policy, self.reference, self.value):
            model.double().eval()

    def put(self, weights: Mapping[str, Array]) -> None:
        """Set policy and value model."""
        for prefix, model in (("policy.", self.policy), ("value_model.", self.value)):
            for name, parameter in model.named_parameters():
                value = weights.get(prefix + name, weights.get(f"policy.{name}"))
                assert value is not None, name
                parameter.data = torch.from_numpy(value)

    def logprobs(self, model: Any, episodes: Sequence[Episode], temperature: float) -> tuple[Any, Any]:
        """Log-probabilities of the policy's tokens, and entropies, of all episodes one after the other."""
        ids, places = _right_padded(episodes)
        before = [(row, place - 1) for row, place in places]
        rows, columns = (torch.tensor(part) for part in zip(*before, strict=True))
        logits = model(input_ids=ids).logits[rows, columns] / temperature
        distribution = logits.log_softmax(dim=-1)
        chosen = torch.tensor([ids[row, place] for row, place in places])
        entropies = -(distribution.exp() * distribution).sum(dim=-1)
        return distribution.gather(1, chosen[:, None])[:, 0], entropies

    def values(self, episodes: Sequence[Episode]) -> tuple[Any, Array]:
        """Values before each token of the policy, and after the last token of all."""
        model = self.value.get_base_model() if hasattr(self.value, "get_base_model") else self.value
        ids, places = _right_padded(episodes)
        values = model.score(model.model(input_ids=ids).last_hidden_state)[..., 0]
        rows, columns = (torch.tensor(part) for part in zip(*places, strict=True))
        last = [len(episode.ids) - 1 for episode in episodes]
        return values[rows, columns - 1], values[range(len(last)), last].detach().numpy()

    def distribution(self, ids: list[int], temperature: float) -> Array:
        """Probabilities of each next token, `(L, V)`."""
        with torch.no_grad():
            return np.exp(log_softmax(self.policy(input_ids=torch.tensor([ids])).logits[0].numpy() / temperature))

    @torch.no_grad()
    def score(self, episode: Episode) -> float:
        hidden = self.rewarding.model(input_ids=torch.tensor([episode.ids])).last_hidden_state[0, -1]
        return float(self.rewarding.score(hidden))


def _right_padded(episodes: Sequence[Episode]) -> tuple[Any, list[tuple[int, int]]]:
    """Ids of all episodes, and row and column of each of the policy's tokens; nothing sees what is behind it."""
    width = max(len(episode.ids) for episode in episodes)
    ids = torch.tensor([episode.ids + [0] * (width - len(episode.ids)) for episode in episodes])
    return ids, [(row, len(e.prompt) + place) for row, e in enumerate(episodes) for place in e.own]


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

    `value_*` are of the tokens at which the value model learns.
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
    loss: float
    d_logprobs: Array
    d_entropy: float
    d_values: Array


def policy_figures(logprobs: Rows, old: Rows, advantages: Rows, settings: Settings) -> tuple[Rows, Rows, Rows, Rows]:
    """Loss, ratio, whether it is clipped, and the derivative of the loss in the log-probability, before weights."""
    low, high = settings.clips
    figures: list[tuple[Array, Array, Array, Array]] = []
    for new, before, advantage in zip(logprobs, old, advantages, strict=True):
        ratio = np.exp(new - before)
        if settings.policy_loss == "cispo":
            weight = np.minimum(ratio, 1 + high)
            figures.append((-weight * advantage * new, ratio, ratio > 1 + high, -weight * advantage))
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
    known: Known, rows: list[int], logprobs: Rows, entropies: Rows, values: Rows, settings: Settings, alone: bool
) -> TokenLosses:
    """Losses of a mini-batch, of those of its rows that have a score.

    Args:
        known: The update.
        rows: The mini-batch's rows that count.
        logprobs: Log-probabilities of their tokens now.
        entropies: Entropies now.
        values: Values now.
        settings: The options.
        alone: Whether the value model learns alone.
    """
    old, episodes = [known.logprobs[row] for row in rows], [known.episodes[row] for row in rows]
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
    total -= settings.entropy_coef * sum(part.sum() for part in entropies) / num_tokens
    total -= sum(weight * part.sum() for weight, part in zip(imitated, logprobs, strict=True))
    of_values, value_clipped, d_values, num_values = [], [], [], 0
    for row, episode, now in zip(rows, episodes, values, strict=True):
        places = learned_places(episode, settings)
        before, target, value = known.values[row][places], known.returns[row][places], now[places]
        error, flat = (value - target) ** 2 / 2, np.zeros(len(places), dtype=bool)
        if settings.cliprange_value is not None:
            near = np.clip(value, before - settings.cliprange_value, before + settings.cliprange_value)
            worse = (near - target) ** 2 / 2
            error, flat = np.maximum(error, worse), worse > error
        slopes = np.zeros(len(now))
        slopes[places] = np.where(flat, 0.0, value - target)
        of_values.append(error)
        value_clipped.append(flat)
        d_values.append(slopes)
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
        loss=float(of_value + (0 if alone else total)),
        d_logprobs=np.concatenate(d_logprobs),
        d_entropy=-settings.entropy_coef / num_tokens,
        d_values=settings.vf_coef * np.concatenate(d_values) / num_values,
    )


# ---- The optimizer ----


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


# ---- A run ----


@dataclass
class Step:
    """What an optimizer step must have been; without one `gradients` is empty."""

    gradients: dict[str, Array]
    after: dict[str, Array]


class Simulation:
    """The updates of a run, one after the other.

    Args:
        configuration: What was drawn.
    """

    def __init__(self, configuration: Configuration) -> None:
        options, self.objects = split(configuration)
        self.settings = settings = Settings.of(options)
        self.twins = Twins(self.objects, settings.share_base_model)
        if self.objects["reference"] == "other":
            self.twins.reference = recording.stopping_policy(seed=5).double().eval()
        self.has_reference = self.objects["reference"] == "other" or settings.kl_coef > 0 or settings.log_kl
        self.coef, self.scores, self.warmup_over = settings.kl_coef, np.zeros(0), False
        self.optimizer, self.update, self.episode = Optimizer(settings), 0, 0
        self.waiting: list[dict[str, float]] = []
        self.waiting_losses: list[float] = []
        self.grad_norm = 0.0

    # ---- Rollout ----

    def episodes_of(self, seen: SeenUpdate) -> list[Episode]:
        if seen.answers is None:
            return [ended_in_turns(episode, self.settings) for episode in seen.episodes]
        return [
            sampled_episode(prompt, ids, self.settings)
            for prompt, ids in zip(seen.prompts, seen.answers.ids.tolist(), strict=True)
        ]

    def check_sampled(self, episodes: Sequence[Episode]) -> None:
        """Check that no token was sampled that `top_k`, `top_p` and `min_p` exclude."""
        settings = self.settings
        for episode in episodes:
            probabilities = self.twins.distribution(episode.ids, settings.temperature)[len(episode.prompt) - 1 : -1]
            may = allowed(probabilities, settings)[np.arange(len(episode.response)), episode.response]
            assert may.all(), f"{episode} has tokens that may not be sampled, at {np.flatnonzero(~may)}"

    @torch.no_grad()
    def known(self, seen: SeenUpdate) -> Known:
        """Everything up to whitened advantages."""
        settings = self.settings
        self.twins.put(seen.weights)
        episodes = self.episodes_of(seen)
        logprobs = cut(self.twins.logprobs(self.twins.policy, episodes, settings.temperature)[0].numpy(), episodes)
        reference = None
        if self.has_reference:
            flat = self.twins.logprobs(self.twins.reference, episodes, settings.temperature)[0]
            reference = cut(flat.numpy(), episodes)
        flat_values, final = self.twins.values(episodes)
        values = cut(flat_values.numpy(), episodes)
        kl = [0 * row for row in logprobs]
        if reference is not None:
            kl = [kl_of(new, ref, settings.kl_estimator) for new, ref in zip(logprobs, reference, strict=True)]
        by_source, given, of_tokens = self._given(episodes)
        paid, of_tokens = self._paid(given, of_tokens, episodes)
        rewards = [-self.coef * penalty + own for penalty, own in zip(kl, of_tokens, strict=True)]
        for row, score in enumerate(paid):
            rewards[row][-1] += score
        counted = [row for row, score in enumerate(paid) if not np.isnan(score)]
        if settings.whiten_rewards:
            rewards = whitened(rewards, counted, keeps_mean=True)
        scores = paid + np.array([part.sum() for part in of_tokens])
        says, weights = self._weights(seen, episodes, logprobs)
        known = Known(
            episodes, logprobs, reference, values, final, by_source, scores, kl, [], [], weights, says, self.coef
        )
        self._judge(known, rewards, counted)
        return known

    def _judge(self, known: Known, rewards: Rows, counted: list[int]) -> None:
        """Add advantages and returns; warm-up may end with them."""
        for _ in range(2):
            advantages, known.returns = [], []
            for row, episode in enumerate(known.episodes):
                end = 0.0 if episode.stopped or not self.settings.bootstrap_truncated else known.final_values[row]
                given = (episode, rewards[row], known.values[row], end, self.settings, self.warms_up)
                advantage, returns = advantages_of(*given)
                advantages.append(advantage)
                known.returns.append(returns)
            passed = explained(known, self.settings) >= self.settings.critic_warmup_explained_variance
            if not (self.warms_up and passed):
                break
            self.warmup_over = True
        known.advantages = whitened(advantages, counted, keeps_mean=False)

    @property
    def warms_up(self) -> bool:
        return not self.warmup_over and self.update < self.settings.critic_warmup_steps

    def _given(self, episodes: Sequence[Episode]) -> tuple[dict[str, Array], Array, Rows]:
        """What each source gives in all, the weighted sum of those that gave something, and that of single tokens."""
        sources: dict[str, list[Any]] = {}
        if self.objects["reward"] in HAVE_MODEL:
            sources["reward_model"] = [self.twins.score(episode) for episode in episodes]
        state = type("State", (), {"global_step": self.update})
        for function in REWARDS[self.objects["reward"]]:
            ids = [episode.response for episode in episodes]
            sources[function.__name__] = function(completion_ids=ids, trainer_state=state)
        weights = self.settings.reward_weights or [1.0] * len(sources)
        weights = weights if isinstance(weights, dict) else dict(zip(sources, weights, strict=True))
        total, by_source = np.zeros(len(episodes)), {}
        of_tokens = [np.zeros(len(episode.own)) for episode in episodes]
        for name, given in sources.items():
            if isinstance(given[0], list):
                own = [np.array(row)[episode.own] for row, episode in zip(given, episodes, strict=True)]
                of_tokens = [sum_ + weights[name] * row for sum_, row in zip(of_tokens, own, strict=True)]
                by_source[name] = np.array([row.sum() for row in own])
            else:
                by_source[name] = np.array([np.nan if score is None else score for score in given])
                total += weights[name] * np.nan_to_num(by_source[name])
        unscored = np.all([np.isnan(scores) for scores in by_source.values()], axis=0)
        return by_source, np.where(unscored, np.nan, total), of_tokens

    def _paid(self, scores: Array, of_tokens: Rows, episodes: Sequence[Episode]) -> tuple[Array, Rows]:
        """The scores that are paid, and the rewards of single tokens."""
        settings, std, mean = self.settings, 1.0, 0.0
        if settings.score_scaling or settings.score_normalization:
            whole = scores + [row.sum() for row in of_tokens]
            self.scores = np.append(self.scores, whole[~np.isnan(whole)])
            std = self.scores.std(ddof=1) if len(self.scores) > 1 else 1.0
            mean = self.scores.mean() if settings.score_normalization and len(self.scores) else 0.0
            std = std if std > 0 else 1.0
        paid = np.clip((scores - mean) / std, -settings.score_clip, settings.score_clip)
        for row, episode in enumerate(episodes):
            if not episode.stopped and not np.isnan(paid[row]):
                replaced = settings.missing_eos_score
                paid[row] = paid[row] - settings.missing_eos_penalty if replaced is None else replaced
        return paid, [row / std for row in of_tokens]

    def _weights(self, seen: SeenUpdate, episodes: Sequence[Episode], logprobs: Rows) -> tuple[Rows | None, Rows]:
        """What the engine says of the tokens, and the weights of the policy's losses."""
        ones = [np.ones(len(row)) for row in logprobs]
        if seen.answers is None or seen.answers.logprobs is None:
            return None, ones
        says = [
            row.double().numpy()[: len(episode.response)]
            for row, episode in zip(seen.answers.logprobs, episodes, strict=True)
        ]
        if not self.settings.importance_sampling_correction:
            return says, ones
        return says, self.truncated_weights(logprobs, says)

    def truncated_weights(self, logprobs: Rows, says: Rows) -> Rows:
        most = self.settings.importance_sampling_clip_max
        return [np.minimum(np.exp(ours - theirs), most) for ours, theirs in zip(logprobs, says, strict=True)]

    # ---- Learning ----

    def run(self, known: Known, seen: SeenUpdate) -> list[Step]:
        """Simulate the steps of an update, note what is logged of it, and go on to the next."""
        figures, steps, norms, micro_ratios, texts = [], [], [], [], []
        rows_of = matched(known.episodes, seen.steps)
        per_epoch, settings, alone = self.settings.num_mini_batches, self.settings, self.warms_up
        num_epochs = settings.num_ppo_epochs
        for number, (step, rows) in enumerate(zip(seen.steps, rows_of, strict=True)):
            counted = [row for row in rows if row in known.scored]
            taken = self._step(known, step, counted) if counted else None
            steps.append(Step({}, {}) if taken is None else taken[0])
            if taken is not None:
                figures.append(taken[1])
                norms.append(taken[2])
                texts += taken[3]
                micro_ratios += ratios_of_parts(known, step, taken[1], counted)
            ends = (number + 1) % per_epoch == 0
            if ends and settings.kl_stop is not None:
                epoch = figures[-per_epoch:] if counted or figures else []
                if epoch and far(epoch) > settings.kl_stop:
                    num_epochs = (number + 1) // per_epoch
                    break
        assert len(seen.steps) == num_epochs * per_epoch, f"{len(seen.steps)} mini-batches, not {num_epochs} epochs"
        check_epochs(rows_of, per_epoch, len(known.episodes))
        logged = rollout_figures(known, self)
        if figures:
            logged |= learned_figures(figures, norms, micro_ratios, texts, num_epochs, self)
        if settings.critic_warmup_steps:
            logged["val/critic_warmup"] = float(alone)
        if settings.kl_target is not None:
            logged["objective/kl_coef"] = known.coef
        self._end(known, seen, logged, figures, texts)
        return steps

    def _step(
        self, known: Known, step: SeenStep, rows: list[int]
    ) -> tuple[Step, TokenLosses, tuple[float, float], list[tuple[float, int]]]:
        settings, episodes = self.settings, [known.episodes[row] for row in rows]
        self.twins.put(step.before)
        logprobs, entropies = self.twins.logprobs(self.twins.policy, episodes, settings.temperature)
        values, _ = self.twins.values(episodes)
        alone = self.warms_up
        old = np.concatenate([known.logprobs[row] for row in rows])
        now = cut(old if alone else logprobs.detach().numpy(), episodes)
        own = (now, cut(entropies.detach().numpy(), episodes), cut(values.detach().numpy(), episodes))
        tokens = losses_of(known, rows, *own, settings, alone)
        for model in (self.twins.policy, self.twins.value):
            model.zero_grad()
        values.backward(torch.from_numpy(tokens.d_values))
        texts: list[tuple[float, int]] = []
        if not alone:
            entropy_slopes = torch.full_like(entropies, tokens.d_entropy)
            torch.autograd.backward([logprobs, entropies], [torch.from_numpy(tokens.d_logprobs), entropy_slopes])
            if settings.ptx_coef > 0:
                texts = [self._learn_texts(step.texts)]
                tokens.loss += settings.ptx_coef * texts[0][0] / texts[0][1]
        gradients = self._gradients(step.before)
        clipped, norm = self.optimizer.clipped(gradients)
        self.grad_norm = norm
        after = self.optimizer.step(step.before, clipped, self.update)
        norms = [
            math.sqrt(sum(float((each**2).sum()) for name, each in gradients.items() if name.startswith(prefix)))
            for prefix in ("policy.", "value_model.")
        ]
        return Step(clipped, after), tokens, (norms[0], norms[1]), texts

    def _learn_texts(self, texts: list[Key]) -> tuple[float, int]:
        """Add the gradients of language modelling; return the sum of the negative log-likelihoods, and the tokens."""
        assert len(texts) == self.settings.batch_size // self.settings.num_mini_batches
        rows = [Episode(list(context), list(learned), False) for context, learned in texts]
        logprobs, _ = self.twins.logprobs(self.twins.policy, rows, 1.0)
        (-self.settings.ptx_coef * logprobs.mean()).backward()
        return -float(logprobs.sum()), len(logprobs)

    def _gradients(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        found = {}
        for prefix, model in (("policy.", self.twins.policy), ("value_model.", self.twins.value)):
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and prefix + name in weights:
                    found[prefix + name] = parameter.grad.numpy().copy()
        return found

    def _end(
        self, known: Known, seen: SeenUpdate, logged: dict[str, float], figures: list[TokenLosses], texts: list[Any]
    ) -> None:
        settings = self.settings
        num_steps = settings.num_ppo_epochs * settings.num_mini_batches
        self.waiting_losses.append(sum(each.loss for each in figures) / num_steps)
        logged["lr"] = settings.learning_rate * settings.rate(self.update)
        self.episode += settings.batch_size
        logged["episode"] = self.episode
        if settings.on_divergence == "skip":
            logged |= {"guard/skipped_rows": 0.0, "guard/skipped_updates": 0.0}
        self.waiting.append(logged)
        if settings.kl_target is not None and not self.warms_up:
            distance = np.mean([row.sum() for row in known.kl])
            error = min(max(distance / settings.kl_target - 1, -0.2), 0.2)
            self.coef *= 1 + error * settings.batch_size / settings.kl_horizon
        if settings.reference_ema is not None:
            self._move_reference(seen)
        self.update += 1

    def _move_reference(self, seen: SeenUpdate) -> None:
        taken = [step.after for step in seen.steps if step.after]
        weights = taken[-1] if taken else seen.weights
        share = self.settings.reference_ema
        assert share is not None
        for name, parameter in self.twins.reference.named_parameters():
            parameter.data = share * parameter.data + (1 - share) * torch.from_numpy(weights[f"policy.{name}"])

    def drained(self) -> dict[str, float]:
        """What is logged now: of the updates since the last log."""
        names = {name: None for update in self.waiting for name in update}
        result = {}
        for name in names:
            values = [update[name] for update in self.waiting if name in update]
            latest = name in ("lr", "episode") or name.startswith("guard/")
            extreme = min if name.endswith(("_min", "/min")) else max if name.endswith(("_max", "/max")) else None
            result[name] = values[-1] if latest else extreme(values) if extreme else float(np.mean(values))
        result |= {"loss": float(np.mean(self.waiting_losses)), "grad_norm": self.grad_norm}
        result["learning_rate"] = self.waiting[-1]["lr"]
        self.waiting, self.waiting_losses = [], []
        return result


def matched(episodes: Sequence[Episode], steps: Sequence[SeenStep]) -> list[list[int]]:
    """Which episodes each mini-batch holds; of equal ones, which say the same, those that the pass has left."""
    left: dict[Key, list[int]] = {}
    found: list[list[int]] = []
    for step in steps:
        if not any(left.values()):
            left = {}
            for row, episode in enumerate(episodes):
                left.setdefault((tuple(episode.prompt), tuple(episode.response)), []).append(row)
        for key in step.rows:
            assert left.get(key), f"{key} is no episode that this pass has left"
        found.append([left[key].pop(0) for key in step.rows])
    return found


def check_epochs(rows_of: list[list[int]], per_epoch: int, num_rows: int) -> None:
    """Each pass learns each episode once, in mini-batches of one size."""
    for start in range(0, len(rows_of), per_epoch):
        epoch = rows_of[start : start + per_epoch]
        assert sorted(row for rows in epoch for row in rows) == list(range(num_rows))
        assert {len(rows) for rows in epoch} == {num_rows // per_epoch}


def far(epoch: Sequence[TokenLosses]) -> float:
    """How far the policy is from where it sampled, nats per token, by k3."""
    moved = np.concatenate([each.log_ratio for each in epoch])
    return float((np.exp(moved) - 1 - moved).mean())


def ratios_of_parts(known: Known, step: SeenStep, tokens: TokenLosses, rows: list[int]) -> list[float]:
    """The mean ratio of each micro-batch that has tokens that count."""
    lengths = [len(known.logprobs[row]) for row in rows]
    by_key: dict[Key, list[Array]] = {}
    for row, ratio in zip(rows, np.split(tokens.ratio, np.cumsum(lengths)[:-1]), strict=True):
        episode = known.episodes[row]
        by_key.setdefault((tuple(episode.prompt), tuple(episode.response)), []).append(ratio)
    means = []
    for part in step.micro_batches:
        ratios = [by_key[key][0] for key in part if key in by_key]
        means += [float(np.concatenate(ratios).mean())] if ratios else []
    return means


# ---- What is logged ----


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


def rollout_figures(known: Known, run: Simulation) -> dict[str, float]:
    """What is logged of the episodes and of what the value model said of them."""
    episodes, settings = known.episodes, run.settings
    lengths = [len(episode.own) for episode in episodes]
    charged = -known.coef * float(np.mean([row.sum() for row in known.kl]))
    different = {(tuple(e.own), tuple(e.response[place] for place in e.own)) for e in episodes}
    logged = {
        "objective/entropy": float(np.mean([-row.sum() for row in known.logprobs])),
        "objective/non_score_reward": charged,
        "val/num_eos_tokens": sum(episode.stopped for episode in episodes),
        "response/length_mean": float(np.mean(lengths)),
        "response/length_min": min(lengths),
        "response/length_max": max(lengths),
        "response/ended_frac": float(np.mean([episode.stopped for episode in episodes])),
        "response/unique_frac": len(different) / len(episodes),
        "val/explained_variance": explained(known, settings),
    }
    if run.has_reference:
        logged["objective/kl"] = float(np.mean([row.sum() for row in known.kl]))
    if known.scored:
        score = float(np.mean(known.scores[known.scored]))
        logged |= {"objective/scores": score, "objective/rlhf_reward": score + charged}
        values, returns = valued(known, settings)
        logged |= {"val/values_mean": values.mean(), "val/values_min": values.min(), "val/values_max": values.max()}
        logged["val/returns_mean"] = returns.mean()
    for name, given in known.by_source.items():
        scored = given[~np.isnan(given)]
        if len(scored):
            logged[f"rewards/{name}/mean"] = scored.mean()
            logged[f"rewards/{name}/std"] = scored.std(ddof=1) if len(scored) > 1 else 0.0
    return logged | engine_figures(known, run)


def engine_figures(known: Known, run: Simulation) -> dict[str, float]:
    """How far the engine's log-probabilities are from those of the forward pass."""
    if known.says is None:
        return {}
    ours, theirs = np.concatenate(known.logprobs), np.concatenate(known.says)
    weights = np.concatenate(run.truncated_weights(known.logprobs, known.says))
    difference, ratio = "sampling/sampling_logp_difference/", "sampling/importance_sampling_ratio/"
    return {
        f"{difference}mean": np.abs(ours - theirs).mean(),
        f"{difference}max": np.abs(ours - theirs).max(),
        f"{ratio}min": weights.min(),
        f"{ratio}mean": weights.mean(),
        f"{ratio}max": weights.max(),
    }


def learned_figures(
    figures: Sequence[TokenLosses],
    norms: Sequence[tuple[float, float]],
    micro_ratios: Sequence[float],
    texts: Sequence[tuple[float, int]],
    num_epochs: int,
    run: Simulation,
) -> dict[str, float]:
    """Means over all tokens that the update has learned from."""
    settings, alone = run.settings, run.warms_up

    def mean(figure: Callable[[TokenLosses], Array]) -> float:
        return float(np.concatenate([figure(each) for each in figures]).mean())

    logged = {
        "policy/approxkl_avg": mean(lambda each: each.log_ratio**2 / 2),
        "policy/clipfrac_avg": 0.0 if alone else mean(lambda each: each.clipped),
        "val/ratio": mean(lambda each: each.ratio),
        "val/ratio_var": float(np.var(micro_ratios, ddof=1)) if len(micro_ratios) > 1 else 0.0,
        "loss/value_avg": mean(lambda each: each.value_loss),
        "val/clipfrac_avg": mean(lambda each: each.value_clipped),
        "policy/grad_norm": float(np.mean([policy for policy, _ in norms])),
        "val/grad_norm": float(np.mean([value for _, value in norms])),
    }
    if not alone:
        logged["policy/entropy_avg"] = mean(lambda each: each.entropy)
        logged["loss/policy_avg"] = mean(lambda each: each.policy_loss)
        logged["val/first_logratio"] = 0.0
        if settings.policy_loss.endswith("squared"):
            logged["policy/distance"] = mean(lambda each: each.log_ratio**2)
    if settings.kl_stop is not None:
        logged |= {"policy/kl_avg": far(figures), "policy/kl_stop_epoch": num_epochs}
    if settings.positive_nll_coef > 0:
        logged["policy/positive_frac"] = mean(lambda each: each.positive)
        nll = np.concatenate([-each.logprobs[each.positive] for each in figures])
        if len(nll) and not alone:
            logged["loss/positive_nll_avg"] = float(nll.mean())
    if texts:
        logged["loss/ptx_avg"] = sum(nll for nll, _ in texts) / sum(count for _, count in texts)
    return logged
