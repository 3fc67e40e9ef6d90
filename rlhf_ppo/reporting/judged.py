"""What `rlhf-ppo judge` has kept: a table of judged pairs, and its win rate beside it."""

from __future__ import annotations

from pathlib import Path

JUDGED = "judged"
"""How such a table's name begins; a further one of the same directory has a number behind it."""


def win_rate_beside(judged: Path) -> Path:
    """Return where the win rate of a table is kept.

    Args:
        judged: The table, such as `judged-2.parquet`.
    """
    return judged.with_name(f"win_rate{judged.stem.removeprefix(JUDGED)}.json")
