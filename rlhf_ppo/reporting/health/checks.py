"""The health checks: what each finds, what it likely comes from, and which options to turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rlhf_ppo.config.health import HealthThresholds
from rlhf_ppo.reporting.health import learning, policy, responses
from rlhf_ppo.reporting.health.history import History, Log


class Check(NamedTuple):
    """One check.

    Attributes:
        name: What it is called.
        thresholds: The fields of `HealthThresholds` that it reads first; it is off where all of them are None.
        symptom: What it finds, in general.
        cause: What that likely comes from.
        options: Options of `PPOConfig` to turn, each with how.
        find: Takes the history and the thresholds; returns the figure in words, or None.
        of_evaluations: Whether it looks at evaluations that hold the judge's metric; else at logs of training.
    """

    name: str
    thresholds: tuple[str, ...]
    symptom: str
    cause: str
    options: Mapping[str, str]
    find: Callable[[History, HealthThresholds], str | None]
    of_evaluations: bool = False

    @property
    def key(self) -> str:
        """What it is called in the logs: 1 where it finds something, else 0."""
        return f"health/{self.name}"

    def message(self, finding: str) -> str:
        """Return what the user is told."""
        return f"Health ({self.name}): {finding}. Likely cause: {self.cause}. What to do: {self.advice}."

    def logs(self, history: History) -> list[Log]:
        """Return the logs that it looks at."""
        return history.evaluations if self.of_evaluations else history.updates

    @property
    def advice(self) -> str:
        """The options to turn, in words."""
        return listed(list(self.options.values()))


def listed(words: Sequence[str]) -> str:
    """Join alternatives: `a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


CHECKS: tuple[Check, ...] = (
    Check(
        "first_ratio",
        ("first_logratio",),
        "the importance ratio is not 1 before the first optimizer step of an update",
        "the models do not give the same log-probabilities twice: dropout or noise in a model, 16-bit rounding, or an "
        "overridden step that evaluates tokens otherwise than it learns from them",
        {
            "bf16": "compute in float32 (bf16=False)",
            "torch_compile": "leave torch_compile off",
            "use_liger_kernel": "leave use_liger_kernel off",
        },
        policy.first_ratio,
    ),
    Check(
        "kl",
        ("kl_per_token", "kl"),
        "the KL to the reference is beyond its budget",
        "the policy has left what the reference says, often for what the reward overrates",
        {
            "kl_coef": "raise kl_coef",
            "learning_rate": "lower learning_rate",
            "num_ppo_epochs": "lower num_ppo_epochs",
            "total_episodes": "stop earlier (total_episodes)",
        },
        policy.kl_budget,
    ),
    Check(
        "kl_growth",
        ("kl_growth",),
        "the KL to the reference rises ever faster",
        "the penalty does not hold the policy: the reward outweighs it, or updates are too large",
        {
            "kl_coef": "raise kl_coef",
            "learning_rate": "lower learning_rate",
            "score_clip": "bound the reward (score_clip)",
        },
        policy.kl_growth,
    ),
    Check(
        "negative_kl",
        ("negative_kl",),
        "the KL to the reference is far below 0",
        "responses are not sampled from what the log-probabilities say: sampling is narrowed, or the policy makes "
        "ever likelier for the reference what it makes less likely itself",
        {
            "top_k": "sample from all tokens (top_k=0)",
            "top_p": "leave top_p at 1",
            "min_p": "leave min_p unset",
            "learning_rate": "lower learning_rate",
        },
        policy.negative_kl,
    ),
    Check(
        "clip_fraction",
        ("clip_fraction",),
        "much of each update is clipped",
        "updates are so large that the ratio leaves the clip range, where the loss says nothing any more",
        {
            "learning_rate": "lower learning_rate",
            "num_ppo_epochs": "lower num_ppo_epochs",
            "num_mini_batches": "lower num_mini_batches",
        },
        policy.clip_fraction,
    ),
    Check(
        "entropy",
        ("entropy",),
        "the policy has become sure of every token",
        "entropy collapse: one way of answering has driven out all others, so that nothing new is tried",
        {
            "kl_coef": "raise kl_coef",
            "learning_rate": "lower learning_rate",
            "temperature": "raise temperature",
            "num_ppo_epochs": "lower num_ppo_epochs",
        },
        policy.entropy,
    ),
    Check(
        "length_limit",
        ("length_limit",),
        "responses grow to the limit",
        "the reward likes long responses, or what is cut is not punished",
        {
            "missing_eos_penalty": "set missing_eos_penalty",
            "missing_eos_score": "set missing_eos_score",
            "response_length": "raise response_length",
            "kl_coef": "raise kl_coef",
        },
        responses.length_limit,
    ),
    Check(
        "length_shrinks",
        ("length_shrinks",),
        "responses shrink to a few tokens",
        "an early end pays: the score or the KL of further tokens is negative, or the reward likes short responses",
        {
            "kl_coef": "change kl_coef",
            "reward_weights": "weigh a reward for substance higher (reward_weights)",
            "missing_eos_penalty": "lower missing_eos_penalty",
            "learning_rate": "lower learning_rate",
        },
        responses.length_shrinks,
    ),
    Check(
        "ended",
        ("ended",),
        "hardly any response has a stop token",
        "response_length is too short for an answer, the model was not trained to end with this stop token, or it has "
        "unlearned it",
        {
            "response_length": "raise response_length",
            "stop_token_id": "name the token that ends a turn (stop_token_id)",
            "stop_strings": "name texts that do (stop_strings)",
            "missing_eos_penalty": "set missing_eos_penalty",
        },
        responses.ended,
    ),
    Check(
        "repeated",
        ("unique",),
        "most prompts get the same response",
        "mode collapse: one response scores well whatever the prompt",
        {
            "kl_coef": "raise kl_coef",
            "learning_rate": "lower learning_rate",
            "reward_weights": "add a reward that reads the prompt (reward_weights)",
        },
        responses.repeated,
    ),
    Check(
        "reward_variance",
        ("reward_std",),
        "all responses have nearly the same reward",
        "the reward is saturated or too sparse: without differences there is no advantage to learn from",
        {
            "score_clip": "raise score_clip",
            "per_device_train_batch_size": "raise per_device_train_batch_size",
            "gradient_accumulation_steps": "raise gradient_accumulation_steps",
            "temperature": "raise temperature",
            "total_episodes": "stop earlier if it is the best reward (total_episodes)",
        },
        learning.reward_variance,
    ),
    Check(
        "judge",
        ("judge_falls",),
        "a held-out judge falls while the score rises",
        "over-optimisation: the policy gets better at the reward, not at what it stands for",
        {
            "kl_coef": "raise kl_coef",
            "load_best_model_at_end": "keep the best model (load_best_model_at_end)",
            "total_episodes": "stop earlier (total_episodes)",
        },
        learning.judge,
        of_evaluations=True,
    ),
    Check(
        "explained_variance",
        ("explained_variance",),
        "the values explain the returns worse than a constant would, for long",
        "the value model does not keep up: it learns too slowly, or its targets move too fast",
        {
            "vf_coef": "raise vf_coef",
            "cliprange_value": "raise cliprange_value",
            "num_ppo_epochs": "raise num_ppo_epochs",
            "score_scaling": "scale the scores (score_scaling)",
        },
        learning.explained_variance,
    ),
    Check(
        "gradient_spike",
        ("gradient_spike",),
        "a gradient is many times as large as usual",
        "a mini-batch with an extreme reward or ratio; it is clipped to max_grad_norm, but says that more may come",
        {
            "score_clip": "bound the reward (score_clip)",
            "learning_rate": "lower learning_rate",
            "max_grad_norm": "lower max_grad_norm",
        },
        learning.gradient_spike,
    ),
    Check(
        "no_gradient",
        ("no_gradient",),
        "there is no gradient",
        "all advantages are 0, all tokens are clipped, or nothing is trainable",
        {
            "learning_rate": "lower learning_rate if the policy has collapsed",
            "score_clip": "raise score_clip if all scores are cut",
            "model_adapter_name": "check which adapter is trained (model_adapter_name)",
        },
        learning.no_gradient,
    ),
)
"""All checks, in the order in which they speak."""
