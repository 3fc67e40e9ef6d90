"""The arguments of `PPOConfig` that say what a run shows of itself."""

from dataclasses import dataclass
from typing import Literal

from rlhf_ppo.config.validation import option as _option


@dataclass(repr=False)
class ShownArguments:
    """What the terminal shows; trackers and `trainer_state.json` get all that is logged, whatever is set here."""

    log_console: Literal["line", "full", "none"] = _option(
        "line",
        "What the terminal shows of a log: 'line', the figures that are watched, and a table at the end of the run; "
        "'full', all of it as a dict, as Trainer does; 'none', nothing.",
    )
