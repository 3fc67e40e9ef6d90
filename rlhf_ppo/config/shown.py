"""The arguments of `PPOConfig` that say what a run shows of itself."""

from dataclasses import dataclass
from typing import Any, Literal, cast

from rlhf_ppo.config.health import HealthThresholds, parse_thresholds
from rlhf_ppo.config.validation import option as _option


@dataclass(repr=False)
class ShownArguments:
    """What the terminal shows, and what of its health a run watches.

    Trackers and `trainer_state.json` get all that is logged, whatever `log_console` is.
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
        "0: that it falls while the score rises is a sign of over-optimisation.",
    )

    def made_thresholds(self) -> HealthThresholds:
        """Return the thresholds of the health checks."""
        return HealthThresholds(**cast(dict[str, Any], parse_thresholds(self.health_thresholds) or {}))
