"""PPO's updates once more, for every option: the equations of `tests/fuzz/formulas.py` in their order.

Of a run the simulation is given which tokens were sampled, which rows a mini-batch holds, and the weights before each
optimizer step. It computes everything else: log-probabilities and values, rewards, advantages, losses, gradients of
tokens, gradients of weights, the step, and the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.fuzz import recording
from tests.fuzz.formulas import (
    Known,
    Optimizer,
    Rows,
    Settings,
    TokenLosses,
    advantages_of,
    allowed,
    cut,
    ended_in_turns,
    explained,
    far,
    kl_of,
    losses_of,
    norm_of,
    sampled_episode,
    valued,
    whitened,
)
from tests.fuzz.options import Configuration
from tests.fuzz.recording import HAVE_MODEL, REWARDS, TINY, Key, SeenStep, SeenUpdate, split
from tests.oracles import Array, Episode, log_softmax

# ---- The models in float64, on unpadded rows: transformers' own code and no other ----


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
            for norm in (module for module in model.modules() if isinstance(module, LlamaRMSNorm)):
                norm.forward = partial(_normed, norm)  # transformers' own computes in float32

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


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _right_padded(episodes: Sequence[Episode]) -> tuple[Any, list[tuple[int, int]]]:
    """Ids of all episodes, and row and column of each of the policy's tokens; nothing sees what is behind it."""
    width = max(len(episode.ids) for episode in episodes)
    ids = torch.tensor([episode.ids + [0] * (width - len(episode.ids)) for episode in episodes])
    return ids, [(row, len(e.prompt) + place) for row, e in enumerate(episodes) for place in e.own]


# ---- The updates ----


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
        self.has_reference = self.objects["reference"] == "other" or settings.kl_coef > 0
        self.coef, self.scores = settings.kl_coef, np.zeros(0)
        self.optimizer, self.update, self.episode = Optimizer(settings), 0, 0
        self.waiting: list[dict[str, float]] = []
        self.waiting_losses: list[float] = []
        self.grad_norm, self.raw_scores = 0.0, np.zeros(0)
        self.sampled_with: dict[str, Array] = {}
        """Weights that sampled the latest rollout."""

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
        self.twins.put(self.sampled_with)
        for episode in episodes:
            probabilities = self.twins.distribution(episode.ids, settings.temperature)[len(episode.prompt) - 1 : -1]
            may = allowed(probabilities, settings)[np.arange(len(episode.response)), episode.response]
            assert may.all(), f"{episode} has tokens that may not be sampled, at {np.flatnonzero(~may)}"

    @torch.no_grad()
    def known(self, seen: SeenUpdate) -> Known:
        """Everything up to whitened advantages."""
        settings = self.settings
        self.sampled_with = seen.weights
        self.twins.put(seen.weights)
        episodes = self.episodes_of(seen)
        logprobs = cut(self.twins.logprobs(self.twins.policy, episodes, settings.temperature)[0].numpy(), episodes)
        reference = None
        if self.has_reference:
            flat = self.twins.logprobs(self.twins.reference, episodes, settings.temperature)[0]
            reference = cut(flat.numpy(), episodes)
        flat, final = self.twins.values(episodes)
        values = cut(flat.numpy(), episodes)
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
        """Add advantages and returns."""
        advantages = []
        for row, episode in enumerate(known.episodes):
            end = 0.0 if episode.ended or not self.settings.bootstrap_truncated else known.final_values[row]
            given = (episode, rewards[row], known.values[row], end, self.settings, self.warms_up)
            advantage, returns = advantages_of(*given)
            advantages.append(advantage)
            known.returns.append(returns)
        known.advantages = whitened(advantages, counted, keeps_mean=False)

    @property
    def warms_up(self) -> bool:
        return self.update < self.settings.critic_warmup_steps

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
        weighed = [scores for name, scores in by_source.items() if weights[name] != 0]
        unscored = np.all([np.isnan(scores) for scores in weighed or by_source.values()], axis=0)
        return by_source, np.where(unscored, np.nan, total), of_tokens

    def _paid(self, scores: Array, of_tokens: Rows, episodes: Sequence[Episode]) -> tuple[Array, Rows]:
        """The scores that are paid, and the rewards of single tokens."""
        settings, std = self.settings, 1.0
        if settings.score_scaling:
            whole = self.raw_scores = scores + [row.sum() for row in of_tokens]
            kept = [settings.missing_eos_score is None or episode.ended for episode in episodes]
            self.scores = np.append(self.scores, whole[kept & ~np.isnan(whole)])
            std = self.scores.std(ddof=1) if len(self.scores) > 1 else 1.0
            std = std if std > 0 else 1.0
        paid = np.clip(scores / std, -settings.score_clip, settings.score_clip)
        for row, episode in enumerate(episodes):
            if not episode.ended and not np.isnan(paid[row]):
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
        return says, self.weights_of(logprobs, says)

    def weights_of(self, logprobs: Rows, says: Rows) -> Rows:
        most = self.settings.importance_sampling_clip_max
        return [np.minimum(np.exp(ours - theirs), most) for ours, theirs in zip(logprobs, says, strict=True)]

    # ---- Learning ----

    def run(self, known: Known, seen: SeenUpdate) -> list[Step]:
        """Simulate the steps of an update, note what is logged of it, and go on to the next."""
        figures, steps, norms, micro_ratios, texts, parts = [], [], [], [], [], []
        rows_of = matched(known.episodes, seen.steps)
        per_epoch, settings, alone = self.settings.num_mini_batches, self.settings, self.warms_up
        num_epochs = settings.num_ppo_epochs
        for number, (step, rows) in enumerate(zip(seen.steps, rows_of, strict=True)):
            counted = [row for row in rows if row in known.scored]
            self.grad_norm = 0.0  # of a mini-batch without a score, too
            taken = self._step(known, step, counted) if counted else None
            steps.append(Step({}, {}) if taken is None else taken[0])
            if taken is not None:
                figures.append(taken[1])
                norms.append(taken[2])
                texts += taken[3]
                micro_ratios += ratios_of_parts(known, step, taken[1], counted)
                parts += [[[*prompt, *response] for prompt, response in part] for part in step.micro_batches]
            if (number + 1) % per_epoch == 0 and settings.kl_stop is not None:
                epoch = figures[-per_epoch:] if counted or figures else []
                if epoch and far(epoch) > settings.kl_stop:
                    num_epochs = (number + 1) // per_epoch
                    break
        assert len(seen.steps) == num_epochs * per_epoch, f"{len(seen.steps)} mini-batches, not {num_epochs} epochs"
        check_epochs(rows_of, per_epoch, len(known.episodes))
        logged = rollout_figures(known, self)
        if figures:
            logged |= learned_figures(figures, norms, micro_ratios, texts, num_epochs, self)
            logged["batch/shared_frac"] = 0.0 if self.settings.share_prefixes is False else shared_fraction(parts)
        if settings.critic_warmup_steps:
            logged["val/critic_warmup"] = float(alone)
        if settings.kl_target is not None:
            logged["objective/kl_coef"] = known.coef
        self._end(known, logged, figures)
        return steps

    def tokens(self, known: Known, weights: Mapping[str, Array], rows: list[int]) -> tuple[TokenLosses, Any, Any, Any]:
        """What weights say of the tokens of a mini-batch; and log-probabilities, entropies and values."""
        episodes, alone = [known.episodes[row] for row in rows], self.warms_up
        self.twins.put(weights)
        logprobs, entropies = self.twins.logprobs(self.twins.policy, episodes, self.settings.temperature)
        values, _ = self.twins.values(episodes)
        now = np.concatenate([known.logprobs[row] for row in rows]) if alone else logprobs.detach().numpy()
        own = (now, entropies.detach().numpy(), values.detach().numpy())
        return losses_of(known, rows, *own, self.settings, alone), logprobs, entropies, values

    def _step(
        self, known: Known, step: SeenStep, rows: list[int]
    ) -> tuple[Step, TokenLosses, tuple[float, float], list[tuple[float, int]]]:
        settings, alone = self.settings, self.warms_up
        tokens, logprobs, entropies, values = self.tokens(known, step.before, rows)
        for model in (self.twins.policy, self.twins.value):
            model.zero_grad()
        values.backward(torch.from_numpy(tokens.d_values))
        texts: list[tuple[float, int]] = []
        if not alone:
            slopes = [torch.from_numpy(each) for each in (tokens.d_logprobs, tokens.d_entropy)]
            torch.autograd.backward([logprobs, entropies], slopes)
            if settings.ptx_coef > 0:
                texts = [self._learn_texts(step.texts)]
                tokens.loss += settings.ptx_coef * texts[0][0] / texts[0][1]
        gradients = self._gradients(step.before)
        clipped, norm = self.optimizer.clipped(gradients)
        self.grad_norm = norm
        after = self.optimizer.step(step.before, clipped, self.update)
        norms = [
            norm_of(each for name, each in gradients.items() if name.startswith(prefix))
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

    def _end(self, known: Known, logged: dict[str, float], figures: list[TokenLosses]) -> None:
        settings = self.settings
        self.waiting_losses.append(sum(each.loss for each in figures) / max(1, len(figures)))
        logged["lr"] = settings.learning_rate * settings.rate(self.update)
        self.episode += settings.batch_size
        logged["episode"] = self.episode
        self.waiting.append(logged)
        if settings.kl_target is not None and not self.warms_up:
            distance = np.mean([row.sum() for row in known.kl])
            error = min(max(distance / settings.kl_target - 1, -0.2), 0.2)
            self.coef *= 1 + error * settings.batch_size / settings.kl_horizon
        self.update += 1

    def drained(self) -> dict[str, float]:
        """What is logged now: of the updates since the last log."""
        names = {name: None for update in self.waiting for name in update}
        result = {}
        for name in names:
            values = [update[name] for update in self.waiting if name in update]
            latest = name in ("lr", "episode")
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
            assert left.get(key), f"{key} is not an episode that this pass has left"
        found.append([left[key].pop(0) for key in step.rows])
    return found


def check_epochs(rows_of: list[list[int]], per_epoch: int, num_rows: int) -> None:
    """Each pass learns each episode once, in mini-batches of one size."""
    for start in range(0, len(rows_of), per_epoch):
        epoch = rows_of[start : start + per_epoch]
        assert sorted(row for rows in epoch for row in rows) == list(range(num_rows))
        assert {len(rows) for rows in epoch} == {num_rows // per_epoch}


def ratios_of_parts(known: Known, step: SeenStep, tokens: TokenLosses, rows: list[int]) -> Rows:
    """The ratios of each micro-batch that has tokens that count."""
    lengths = [len(known.logprobs[row]) for row in rows]
    by_key: dict[Key, list[Array]] = {}
    for row, ratio in zip(rows, np.split(tokens.ratio, np.cumsum(lengths)[:-1]), strict=True):
        episode = known.episodes[row]
        by_key.setdefault((tuple(episode.prompt), tuple(episode.response)), []).append(ratio)
    found = []
    for part in step.micro_batches:
        ratios = [by_key[key][0] for key in part if key in by_key]
        found += [np.concatenate(ratios)] if ratios else []
    return found


SHORTEST = 8


def shared_fraction(parts: list[list[list[int]]]) -> float:
    """The share of the micro-batches' tokens that are computed with another row; few do not count."""
    sizes = [(sum(map(len, rows)), tree_size(rows)) for rows in parts]
    return 1 - sum(tree if tree <= 0.95 * whole else whole for whole, tree in sizes) / sum(whole for whole, _ in sizes)


def tree_size(rows: list[list[int]], depth: int = 0) -> int:
    """Tokens of rows after the first `depth`, which they share; `SHORTEST` or more that some share count once."""
    groups: dict[tuple[int, ...], list[list[int]]] = {}
    for number, row in enumerate(rows):
        further = tuple(row[depth : depth + SHORTEST])
        groups.setdefault(further if len(further) == SHORTEST else (-1 - number,), []).append(row)
    total = 0
    for group in groups.values():
        alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*group, strict=False))
        end = sum(1 for _ in alike)
        total += end - depth + (tree_size(group, end) if len(group) > 1 else 0)
    return total


# ---- What is logged ----


def rollout_figures(known: Known, run: Simulation) -> dict[str, float]:
    """What is logged of the episodes and of what the value model said of them."""
    episodes, settings = known.episodes, run.settings
    lengths = [len(episode.own) for episode in episodes]
    charged = -known.coef * float(np.mean([row.sum() for row in known.kl]))
    different = {(tuple(e.own), tuple(e.response[place] for place in e.own)) for e in episodes}
    logged = {
        "objective/entropy": float(np.mean([-row.sum() for row in known.logprobs])),
        "objective/non_score_reward": charged,
        "val/num_eos_tokens": sum(episode.ended for episode in episodes),
        "response/length_mean": float(np.mean(lengths)),
        "response/length_min": min(lengths),
        "response/length_max": max(lengths),
        "response/ended_frac": float(np.mean([episode.ended for episode in episodes])),
        "response/unique_frac": len(different) / len(episodes),
        "val/explained_variance": explained(known, settings),
    }
    if run.has_reference:
        logged["objective/kl"] = float(np.mean([row.sum() for row in known.kl]))
    if known.scored:
        score = float(np.mean(known.scores[known.scored]))
        logged |= {"objective/scores": score, "objective/rlhf_reward": score + charged}
        if settings.score_scaling:
            logged["objective/raw_scores"] = float(np.nanmean(run.raw_scores))
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
    weights = np.concatenate(run.weights_of(known.logprobs, known.says))
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
    micro_ratios: Rows,
    texts: Sequence[tuple[float, int]],
    num_epochs: int,
    run: Simulation,
) -> dict[str, float]:
    """Means over all tokens that the update has learned from."""
    settings, alone = run.settings, run.warms_up

    def mean(figure: Callable[[TokenLosses], Array]) -> float:
        return float(np.concatenate([figure(each) for each in figures]).mean())

    means = [each.mean() for each in micro_ratios]
    logged = {
        "policy/approxkl_avg": mean(lambda each: each.log_ratio**2 / 2),
        "policy/clipfrac_avg": 0.0 if alone else mean(lambda each: each.clipped),
        "val/ratio": mean(lambda each: each.ratio),
        "val/ratio_var": float(np.var(means, ddof=1)) if len(means) > 1 else 0.0,
        "loss/value_avg": mean(lambda each: each.value_loss),
        "val/clipfrac_avg": mean(lambda each: each.value_clipped),
        "policy/grad_norm": float(np.mean([policy for policy, _ in norms])),
        "val/grad_norm": float(np.mean([value for _, value in norms])),
    }
    if not alone:
        logged["policy/entropy_avg"] = mean(lambda each: each.entropy)
        logged["loss/policy_avg"] = mean(lambda each: each.policy_loss)
        logged["val/first_logratio"] = float(np.sqrt((np.log(micro_ratios[0]) ** 2).mean()))
        assert logged["val/first_logratio"] < 1e-4
        if settings.policy_loss.endswith("squared"):
            logged["policy/distance"] = mean(lambda each: each.log_ratio**2)
    if settings.kl_stop is not None:
        logged |= {"policy/kl_avg": far(figures), "policy/kl_stop_epoch": num_epochs}
    if texts:
        logged["loss/ptx_avg"] = sum(nll for nll, _ in texts) / sum(count for _, count in texts)
    return logged
