"""Groups of arguments of `PPOConfig`: generation engine, logs and health checks, and published recipes."""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from rlhf_ppo.config.validation import FLOAT32_LARGEST, LONGEST_WAIT, Interval, python_number, read_json, told
from rlhf_ppo.config.validation import option as _option

ENGINE_RANGES: dict[str, Interval] = {
    "generation_batch_size": Interval(1, math.inf),
    "importance_sampling_clip_max": Interval(0, FLOAT32_LARGEST, open_low=True),
    "vllm_server_port": Interval(1, 65535),
    "vllm_group_port": Interval(1, 65535),
    "vllm_server_timeout": Interval(0, LONGEST_WAIT),
    "vllm_gpu_memory_utilization": Interval(0, 1, open_low=True),
    "vllm_max_model_length": Interval(1, math.inf),
    "vllm_tensor_parallel_size": Interval(1, math.inf),
}
"""Range of each numeric argument."""


def is_vllm_available() -> bool:
    """Return whether TRL finds an installed vLLM that it supports."""
    from trl.import_utils import is_vllm_available

    return is_vllm_available()


@dataclass(repr=False)
class EngineArguments:
    """Arguments of the generation engine; the `vllm_*` fields have the names and meanings of TRL's `GRPOConfig`.

    The `vllm_*` fields have an effect with `generation_engine="vllm"` only.
    """

    generation_engine: Literal["transformers", "continuous", "vllm"] = _option(
        "transformers",
        "What generates responses: 'transformers', its `generate`; 'continuous', its continuous batching, where a new "
        "prompt takes the place of each response that ends; 'vllm', through TRL.",
    )
    generation_batch_size: int | None = _option(
        None,
        "Rows that are generated from at once, on each process. None: the whole local batch with 'vllm' and, where "
        "its cache fits by the estimate, on a GPU; elsewhere local_rollout_forward_batch_size.",
    )
    importance_sampling_correction: bool = _option(
        True,
        "Weight each token's policy loss by how much likelier the training forward pass makes it than the engine did "
        "(truncated importance sampling); for engines that say their log-probabilities: 'continuous' and 'vllm'.",
    )
    importance_sampling_clip_max: float = _option(
        2.0, "Largest weight of importance_sampling_correction; larger ones are cut to it."
    )
    vllm_mode: Literal["colocate", "server"] = _option(
        "colocate", "'colocate': vLLM runs in the training processes; 'server': a server of its own is asked."
    )
    vllm_server_base_url: str | None = _option(
        None, "URL of the vLLM server, such as http://localhost:8000; instead of vllm_server_host and _port."
    )
    vllm_server_host: str = _option("0.0.0.0", "Host of the vLLM server.")
    vllm_server_port: int = _option(8000, "Port of the vLLM server.")
    vllm_server_timeout: float = _option(
        240.0,
        "How long the vLLM server may leave the question unanswered whether it is up, in seconds: at the start, and "
        "while it generates or takes weights. One request may take ddp_timeout seconds.",
    )
    vllm_group_port: int = _option(51216, "Port through which the vLLM server is sent the policy's weights.")
    vllm_gpu_memory_utilization: float = _option(
        0.3, "Share of the device's memory that a colocated vLLM may take, for weights and cache."
    )
    vllm_max_model_length: int | None = _option(
        None, "Longest prompt with its response in a colocated vLLM, in tokens; None: what the model can place."
    )
    vllm_tensor_parallel_size: int = _option(
        1, "Number of processes over which a colocated vLLM splits the model; must divide their number."
    )
    vllm_enable_sleep_mode: bool = _option(
        False, "Free a colocated vLLM's memory while the models learn; its weights are sent again before each use."
    )
    vllm_model_impl: Literal["auto", "vllm", "transformers"] = _option(
        "vllm", "Whose implementation of the model a colocated vLLM runs."
    )

    def _check_engine(self) -> None:
        """Raise if the selected engine is not installed.

        Raises:
            ValueError: vLLM is not installed.
        """
        if self.generation_engine == "vllm" and not is_vllm_available():
            raise ValueError(
                "generation_engine='vllm' needs vLLM, which is not installed; `pip install trl[vllm]`, or set "
                "generation_engine to 'continuous' or 'transformers'"
            )


@dataclass(frozen=True)
class HealthThresholds:
    """Thresholds of the health checks; None turns a check off.

    A log is the mean over `logging_steps` updates. Noisy metrics must exceed their threshold in `patience` consecutive
    logs.

    Attributes:
        patience: Number of consecutive logs.
        first_logratio: Largest `val/first_logratio`, nats.
        kl: Largest `objective/kl`, nats per response. None: no limit.
        kl_per_token: Largest `objective/kl` per token of the mean response, nats.
        kl_growth: Largest growth of the KL's increase, twice in a row. Compares the increases between four periods of
            `patience` logs; each period must lie entirely above the previous one, and the KL must have doubled.
        negative_kl: Largest size of a negative `objective/kl` per token, nats.
        clip_fraction: Largest `policy/clipfrac_avg`.
        explained_variance: Smallest `val/explained_variance`.
        explained_variance_logs: Number of consecutive logs below it.
        entropy: Smallest `policy/entropy_avg`, as a share of the first one logged.
        length_limit: Largest `response/length_mean`, as a share of `response_length`, where responses were shorter
            at first.
        length_shrinks: Smallest `response/length_mean`, as a share of the first one logged.
        ended: Smallest `response/ended_frac`, where responses can end.
        reward_std: Smallest `rewards/<name>/std`, as a share of the largest one logged.
        judge_falls: Number of consecutive decreases of the held-out judge while the score rises.
        gradient_spike: Largest `grad_norm`, as a multiple of the median before; only above `max_grad_norm`.
        no_gradient: Smallest `grad_norm`.
        unique: Smallest `response/unique_frac`, where it was larger than twice that at first.
        reward_accuracy: Smallest accuracy of the reward model on held-out pairs.
        win_rate: Smallest upper end of the interval of the judge's win rate, after training.
        critic_gain: Smallest lower end of the interval of `critic/gain_over_prompt`.
    """

    patience: int = 3
    first_logratio: float | None = 0.1
    kl: float | None = None
    kl_per_token: float | None = 1.0
    kl_growth: float | None = 1.75
    negative_kl: float | None = 0.1
    clip_fraction: float | None = 0.4
    explained_variance: float | None = 0.0
    explained_variance_logs: int = 20
    entropy: float | None = 0.1
    length_limit: float | None = 0.95
    length_shrinks: float | None = 0.2
    ended: float | None = 0.05
    reward_std: float | None = 0.05
    judge_falls: int | None = 4
    gradient_spike: float | None = 20.0
    no_gradient: float | None = 1e-8
    unique: float | None = 0.2
    reward_accuracy: float | None = 0.6
    win_rate: float | None = 0.5
    critic_gain: float | None = 0.0


_COUNTS = {"patience", "explained_variance_logs", "judge_falls"}
_ALWAYS = {"patience", "explained_variance_logs"}


def parse_thresholds(given: Any) -> dict[str, float | None] | None:
    """Parse and check thresholds from Python, YAML or a command line.

    Args:
        given: A dict of fields of `HealthThresholds`, its JSON text, or None for the defaults.

    Raises:
        TypeError: It has another type, or a value is not a number.
        ValueError: A name is unknown, a number is not finite, or a count is not positive.
    """
    if isinstance(given, str):
        try:
            given = read_json(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"health_thresholds={given!r:.80} is no JSON: {error}") from error
    if given is None:
        return None
    if not isinstance(given, dict):
        raise TypeError(
            f"health_thresholds={given!r} must be a dict of thresholds, such as "
            """{"kl": 30, "clip_fraction": null}; null (None) turns a check off"""
        )
    names = [field.name for field in fields(HealthThresholds)]
    for name in given:
        if name not in names:
            raise ValueError(f"health_thresholds has no {name!r}; there are {', '.join(names)}")
    return {name: _checked(name, python_number(value)) for name, value in given.items()}


def _checked(name: str, value: Any) -> float | None:
    what = f"health_thresholds[{name!r}]={told(value)}"
    if value is None and name not in _ALWAYS:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number" + ("" if name in _ALWAYS else ", or None to turn the check off"))
    if not Interval(-math.inf, math.inf).holds(value):
        raise ValueError(f"{what} must be finite" + ("" if name in _ALWAYS else "; None turns the check off"))
    if name not in _COUNTS:
        return value
    if value < 1 or value != int(value):
        raise ValueError(f"{what} must be a whole number of at least 1")
    return int(value)


def logging_interval(num_updates: int) -> int:
    """Return the default of `logging_steps`: 10, or less where a run would have fewer than 20 logs."""
    return min(10, max(1, num_updates // 20))


@dataclass(repr=False)
class LoggingArguments:
    """Arguments of the terminal output and the health checks.

    Trackers and `trainer_state.json` always get every metric, whatever `log_console` is.
    """

    log_console: Literal["line", "full", "none"] = _option(
        "line",
        "What the terminal shows of a log: 'line', the figures that are watched, and a table at the end of the run; "
        "'full', all of it as a dict, as Trainer does; 'none', nothing.",
    )
    health_checks: bool = _option(
        True,
        "Watch the logs for signs that training goes wrong, warn once of each with the option to turn, and log "
        "health/<check> (0 or 1).",
    )
    health_thresholds: dict[str, float | None] | str | None = _option(  # noqa: RUF009 (a new field object)
        None,
        "From which figures on a health check says something, by the names of HealthThresholds: a dict or its JSON "
        """text, such as '{"kl": 30, "clip_fraction": null}'; null (None) turns a check off.""",
    )
    health_judge: str = _option(
        "eval_score",
        "Metric of an evaluation that training does not see, such as eval_rewards/judge/mean of a reward with weight "
        "0: that it falls while the score rises is a sign of over-optimisation. With several evaluation sets the "
        "default is the score of the first.",
    )

    def given_thresholds(self) -> dict[str, Any]:
        """Return the thresholds of the health checks that the user set, by name."""
        return parse_thresholds(self.health_thresholds) or {}


RECIPE_RANGES: dict[str, Interval] = {
    "num_generations": Interval(1, math.inf),
    "cliprange_high": Interval(0, FLOAT32_LARGEST, open_low=True),
    "dual_clip": Interval(1, FLOAT32_LARGEST, open_low=True),
    **dict.fromkeys(("entropy_coef", "ptx_coef", "positive_nll_coef"), Interval(0, FLOAT32_LARGEST)),
    "positive_nll_threshold": Interval(-FLOAT32_LARGEST, FLOAT32_LARGEST),
    **dict.fromkeys(("kl_target", "kl_stop"), Interval(0, FLOAT32_LARGEST, open_low=True)),
    "kl_horizon": Interval(1, FLOAT32_LARGEST),
    "critic_learning_rate": Interval(0, FLOAT32_LARGEST),
    "reference_ema": Interval(0, 1, open_high=True),
    "lam_policy": Interval(0, 1),
    "lam_critic": Interval(0, 1),
    "length_adaptive_alpha": Interval(0, FLOAT32_LARGEST, open_low=True),
    **dict.fromkeys(("critic_warmup_steps", "critic_audit_steps"), Interval(0, math.inf)),
    "critic_warmup_explained_variance": Interval(0, 1, open_high=True),
}
"""Range of each numeric argument."""


@dataclass(repr=False)
class RecipeArguments:
    """Options of published recipes; all are off by default and then do not change any number."""

    num_generations: int = _option(
        1,
        "Responses to each prompt of an update, such as 16: the prompts of an update are that many times fewer, and "
        "the episodes of a pass over them that many times more.",
    )

    log_kl: bool = _option(
        False,
        "With kl_coef=0: hold and run a reference all the same, so that the KL to it is logged. Else there is none, "
        "unless ref_model or ref_adapter_name gives one, or a KL controller or a reward needs one.",
    )

    kl_target: float | None = _option(
        None,
        "KL of a response, in nats, towards which kl_coef moves after each update: by at most a fifth, times the "
        "update's share of kl_horizon (arXiv 1909.08593, section 2.2). None: kl_coef stays.",
    )
    kl_horizon: float = _option(
        10_000,
        "Episodes over which kl_coef moves towards kl_target; the fewer, the faster. An update counts as at most one "
        "horizon, so fewer than batch_size change nothing more.",
    )
    kl_stop: float | None = _option(
        None,
        "End an update's epochs once the policy has moved this far from where it sampled, in nats per token: the "
        "mean over an epoch of k3 (http://joschu.net/blog/kl-approx.html). None: num_ppo_epochs in any case.",
    )

    reference_ema: float | None = _option(
        None,
        "Move the reference towards the policy after each update: reference <- x reference + (1 - x) policy, such as "
        "0.99 (arXiv 2404.10719). It needs a reference with weights of its own, so no adapters; a given ref_model is "
        "changed in place. None: the reference stays.",
    )

    # --- Scores and values ---
    score_scaling: bool = _option(
        False, "Divide scores by the standard deviation of all scores of the run so far, of all processes."
    )
    score_normalization: bool = _option(
        False,
        "Subtract the mean of all scores of the run so far, and divide by their standard deviation (arXiv "
        "2307.04964); then score_clip. Not together with score_scaling.",
    )
    value_head_init: Literal["zero", "normal"] = _option(
        "zero",
        "Head of a value model that is made from the policy, of d inputs: 'zero', or 'normal' of standard deviation "
        "1 / sqrt(d + 1) (arXiv 2403.17031).",
    )

    critic_learning_rate: float | None = _option(
        None,
        "Learning rate of the value model, on the schedule of learning_rate, such as 1e-5 beside 1e-6. None: "
        "learning_rate.",
    )
    critic_warmup_steps: int = _option(
        0,
        "PPO updates at the start of a run that train the value model alone, on returns of lambda 1, such as 10; the "
        "policy stays as it is (arXiv 2503.01491, 2504.05118).",
    )
    critic_warmup_explained_variance: float | None = _option(
        None,
        "End critic warm-up before the first update whose values have this explained variance, such as 0.5. None: "
        "after critic_warmup_steps.",
    )

    critic_audit_steps: int = _option(
        0,
        "PPO updates between two audits of the value model, such as 50: it is compared with Monte Carlo returns of "
        "prefixes of held-out responses (arXiv 2410.01679), 65 responses to each held-out prompt. 0: none.",
    )

    # --- Advantages ---
    lam_policy: float | None = _option(None, "Lambda of the advantages alone, such as 0.95. None: lam.")
    lam_critic: float | None = _option(
        None, "Lambda of the returns that the value model learns, such as 1 (arXiv 2504.05118). None: lam."
    )
    length_adaptive_alpha: float | None = _option(
        None,
        "Lambda of a response's advantages by its length l: 1 - 1 / (alpha l), such as 0.05 (arXiv 2504.05118); not "
        "together with lam_policy. None: the same for all.",
    )

    gae_level: Literal["token", "turn"] = _option(
        "token",
        "What GAE takes for one action: a 'token', or a 'turn', the tokens that the policy wrote between two answers "
        "of a tool or an environment; gamma and the lambdas are then per turn (arXiv 2512.17008).",
    )

    # --- Arithmetic ---
    lm_head_float32: bool = _option(
        False,
        "With bf16 or fp16: multiply hidden states and the language-model head in float32, in sampling, in all "
        "log-probabilities and in learning (arXiv 2506.13585, 2510.13786). Not inside vLLM. In float32 runs it "
        "changes nothing.",
    )

    # --- Losses ---
    policy_loss: str = _option(
        "ppo",
        "The policy's loss of a token: 'ppo'; 'gspo', with the ratio of the whole response (arXiv 2507.18071; "
        "cliprange is then 3e-4 and cliprange_high 4e-4 where neither is given, whatever the preset); 'cispo', the "
        "policy gradient weighted by the ratio up to 1 + cliprange_high (arXiv 2506.13585); or a function (logprobs, "
        "experience, args), as 'path/file.py:function' or 'package.module.function'.",
    )
    cliprange: float = _option(0.2, "How far the importance ratio may leave 1 before its gain is clipped.")
    cliprange_value: float | None = _option(
        0.2, "How far a value may leave the rollout's estimate before it is clipped; None, or inf, clips none."
    )
    cliprange_high: float | None = _option(
        None,
        "How far the importance ratio may rise above 1, where cliprange says how far it may fall below, such as 0.28 "
        "(arXiv 2503.14476). None: as far as cliprange.",
    )
    dual_clip: float | None = _option(
        None,
        "From which importance ratio on a token with a negative advantage has no gradient, such as 3 (arXiv "
        "1912.09729). None: from none.",
    )
    entropy_coef: float = _option(0.0, "Weight of the policy's mean entropy per token, which is added to the gain.")
    positive_nll_coef: float = _option(
        0.0,
        "Weight of the mean negative log-likelihood, over tokens, of the responses that are paid more than "
        "positive_nll_threshold: these are imitated, such as with 0.1 (arXiv 2504.05118). 0: none.",
    )
    positive_nll_threshold: float = _option(
        0.0, "With positive_nll_coef: the score, as objective/scores has it, above which a response is imitated."
    )
    ptx_coef: float = _option(
        0.0,
        "Weight of the mean negative log-likelihood of tokens of ptx_dataset, of which each optimizer step learns as "
        "many rows as the mini-batch has episodes (arXiv 2203.02155). 0: none.",
    )
    loss_aggregation: Literal["token", "sequence", "constant"] = _option(
        "token",
        "How the policy's losses of tokens become that of a mini-batch: 'token', one mean over all tokens; "
        "'sequence', the mean within each response, then over responses; 'constant', the sum over episodes x "
        "response_length (arXiv 2503.20783).",
    )


GSPO_CLIP_RANGES = MappingProxyType({"cliprange": 3e-4, "cliprange_high": 4e-4})
"""Clip ranges of `policy_loss="gspo"`, for the ratio of a whole response (arXiv 2507.18071, section 5.1)."""


def resolve_clip_ranges(args: Any, named: Collection[str], is_known: bool = True) -> None:
    """Set the clip ranges of `policy_loss="gspo"` if neither range is given.

    Args:
        args: Arguments with `policy_loss`, `cliprange` and `cliprange_high`; the last two are set in place.
        named: The options that are given.
        is_known: Whether `named` has only the user's options. `HfArgumentParser` and `dataclasses.replace` pass every
            option: default ranges then count as not given.
    """
    if args.policy_loss != "gspo":
        return
    are_defaults = (args.cliprange, args.cliprange_high) == (0.2, None)
    is_given = bool({*GSPO_CLIP_RANGES} & {*named}) if is_known else not are_defaults
    if not is_given:
        args.cliprange, args.cliprange_high = GSPO_CLIP_RANGES.values()
    elif args.cliprange_high is None:
        args.cliprange_high = args.cliprange  # explicitly, so that a copy of the arguments keeps both


def resolve_recipes(args: RecipeArguments, named: Collection[str], is_known: bool) -> None:
    """Resolve defaults that depend on other arguments; see `resolve_clip_ranges` for `named` and `is_known`."""
    resolve_clip_ranges(args, named, is_known)
    if args.cliprange_value == math.inf:
        args.cliprange_value = None


def check_warmup_length(args: RecipeArguments, num_updates: int) -> None:
    """Check that critic warm-up ends before the run does.

    Raises:
        ValueError: It lasts for the whole run.
    """
    if args.critic_warmup_explained_variance is None and args.critic_warmup_steps >= num_updates > 0:
        raise ValueError(
            f"critic_warmup_steps={args.critic_warmup_steps} is the whole run of {num_updates} updates, in which "
            "the policy would not learn; lower it, or let critic_warmup_explained_variance end it"
        )


def check_recipes(args: RecipeArguments, kl_coef: float) -> None:
    """Check options that exclude each other.

    Args:
        args: The options.
        kl_coef: Coefficient of the KL penalty.

    Raises:
        ValueError: Two of them are set.
    """
    if args.dual_clip is not None and args.policy_loss in ("gspo", "cispo"):
        raise ValueError(
            f"dual_clip={args.dual_clip} has no place in policy_loss={args.policy_loss!r}; leave it None, or set "
            "policy_loss to 'ppo'"
        )
    if args.kl_target is not None and kl_coef == 0:
        raise ValueError(
            f"kl_target={args.kl_target} multiplies kl_coef=0, which stays 0; start from a positive kl_coef"
        )
    if args.score_scaling and args.score_normalization:
        raise ValueError(
            "score_scaling=True and score_normalization=True exclude each other; the second one scales too"
        )
    if args.lam_policy is not None and args.length_adaptive_alpha is not None:
        raise ValueError(
            f"lam_policy={args.lam_policy} and length_adaptive_alpha={args.length_adaptive_alpha} exclude each other; "
            "leave one None"
        )
    highest = 1 + (args.cliprange if args.cliprange_high is None else args.cliprange_high)
    if args.dual_clip is not None and args.dual_clip <= highest:
        raise ValueError(
            f"dual_clip={args.dual_clip} must lie above the clip range, which ends at {highest:g}; raise it, such as "
            "to 3"
        )
