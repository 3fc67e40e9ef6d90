"""The arguments of `PPOConfig` from published recipes of PPO on language models, all off by default."""

from dataclasses import dataclass

from rlhf_ppo.config.validation import Interval
from rlhf_ppo.config.validation import option as _option

RECIPE_RANGES: dict[str, Interval] = {}
"""The values that a number may have."""


@dataclass(repr=False)
class RecipeArguments:
    """Options of published recipes. Off, which is the default, a run's numbers are those of a run without them."""

    log_kl: bool = _option(
        False,
        "With kl_coef=0: hold and run a reference all the same, so that the KL to it is logged. Else there is none, "
        "unless ref_model or ref_adapter_name gives one, or a KL controller or a reward needs one.",
    )
