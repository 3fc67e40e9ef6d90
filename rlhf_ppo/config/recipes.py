"""The arguments of `PPOConfig` from published recipes of PPO on language models, all off by default."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

from rlhf_ppo.config.validation import FLOAT32_LARGEST, Interval
from rlhf_ppo.config.validation import option as _option

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
    "critic_warmup_steps": Interval(0, math.inf),
    "critic_warmup_explained_variance": Interval(0, 1, open_high=True),
}
"""The values that a number may have."""


@dataclass(repr=False)
class RecipeArguments:
    """Options of published recipes. Off, which is the default, a run's numbers are those of a run without them."""

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

    @property
    def counts_scores(self) -> bool:
        """Whether the mean and spread of all scores of the run are needed."""
        return self.score_scaling or self.score_normalization


class _Checked(Protocol):
    kl_coef: float
    kl_target: float | None
    score_normalization: bool
    score_scaling: bool
    cliprange: float
    cliprange_high: float | None
    cliprange_value: float | None
    dual_clip: float | None
    lam_policy: float | None
    length_adaptive_alpha: float | None
    policy_loss: str


GSPO_CLIP_RANGES = MappingProxyType({"cliprange": 3e-4, "cliprange_high": 4e-4})
"""The clip ranges of `policy_loss="gspo"`, for the ratio of a whole response, 2507.18071, section 5.1."""


def settle_clip_ranges(args: Any, named: Collection[str], is_known: bool = True) -> None:
    """Give `policy_loss="gspo"` its own clip ranges where neither range is given.

    Args:
        args: Arguments with `policy_loss`, `cliprange` and `cliprange_high`; the two are set in place.
        named: The options that are given.
        is_known: Whether `named` says what the user gave. A plain `HfArgumentParser`, and `dataclasses.replace`, name
            every option: ranges that are the defaults then count as not given.
    """
    if args.policy_loss != "gspo":
        return
    are_defaults = (args.cliprange, args.cliprange_high) == (0.2, None)
    is_given = bool({*GSPO_CLIP_RANGES} & {*named}) if is_known else not are_defaults
    if not is_given:
        args.cliprange, args.cliprange_high = GSPO_CLIP_RANGES.values()
    elif args.cliprange_high is None:
        args.cliprange_high = args.cliprange  # which None means; a copy of the arguments then keeps both


def settle_recipes(args: _Checked, named: Collection[str], is_known: bool) -> None:
    """Fill in what depends on other arguments; see `settle_clip_ranges` for the last two."""
    settle_clip_ranges(args, named, is_known)
    if args.cliprange_value == math.inf:
        args.cliprange_value = None


def check_warmup_length(args: RecipeArguments, num_updates: int) -> None:
    """Check that critic warm-up leaves updates to the policy.

    Raises:
        ValueError: It lasts for the whole run.
    """
    if args.critic_warmup_explained_variance is None and args.critic_warmup_steps >= num_updates > 0:
        raise ValueError(
            f"critic_warmup_steps={args.critic_warmup_steps} is the whole run of {num_updates} updates, in which "
            "the policy would not learn; lower it, or let critic_warmup_explained_variance end it"
        )


def check_recipes(args: _Checked) -> None:
    """Check options that exclude each other.

    Raises:
        ValueError: Two do.
    """
    if args.dual_clip is not None and args.policy_loss in ("gspo", "cispo"):
        raise ValueError(
            f"dual_clip={args.dual_clip} has no place in policy_loss={args.policy_loss!r}; leave it None, or set "
            "policy_loss to 'ppo'"
        )
    if args.kl_target is not None and args.kl_coef == 0:
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
