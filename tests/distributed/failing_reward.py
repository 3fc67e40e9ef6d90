"""A reward function that the launch tests name on the command line."""

import os


def fails_on_rank_1(completions, trainer_state, **_):
    """Raises in the second update of rank 1."""
    if os.environ["RANK"] == "1" and trainer_state.global_step == 1:
        raise ZeroDivisionError("no such luck")
    return [0.0] * len(completions)
