"""An error of one process ends all of them, with the same error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object

from rlhf_ppo.processes.collectives import on_any_rank
from rlhf_ppo.processes.signals import Stopped


@contextmanager
def failing_together(accelerator: Accelerator | PartialState) -> Iterator[None]:
    """Run a block of each rank's own work; an error on one rank is raised on all, which would else wait forever.

    Args:
        accelerator: Knows the process group; with one process nothing is exchanged.

    Raises:
        Exception: Another rank failed. An error of this package, such as `DivergenceError`, is the same on all ranks;
            one of Python's own keeps its type and tells the rank; any other is a `RuntimeError` that tells rank and
            type.
        Stopped: No rank failed, and one of them was stopped by a signal.
    """
    own: Exception | Stopped | None = None
    try:
        yield
    except (Exception, Stopped) as error:
        own = error
    if accelerator.num_processes > 1 and on_any_rank(own is not None):
        told = _Failure.of(own, accelerator.process_index) if isinstance(own, Exception) else own
        others = gather_object([told])
        own = own if isinstance(own, Exception) else _of_the_others(others) or own
    if own is not None:
        raise own


@dataclass(frozen=True)
class _Failure:
    """What one rank tells the others of its error, which itself might not travel.

    Attributes:
        rank: Where it was raised.
        kind: Its type, where the others can raise one of it; else None.
        text: Its text, with the type where `kind` is None.
    """

    rank: int
    kind: type[Exception] | None
    text: str

    @classmethod
    def of(cls, error: Exception, rank: int) -> _Failure:
        if type(error) in _TAKE_A_TEXT or _is_ours(type(error)):
            return cls(rank, type(error), str(error))
        return cls(rank, None, f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        """Return what a rank raises that did not fail itself."""
        if self.kind is not None and _is_ours(self.kind):
            return self.kind(self.text)
        return (self.kind or RuntimeError)(f"rank {self.rank} failed: {self.text}")


_TAKE_A_TEXT = (ValueError, TypeError, OSError, ConnectionError, FileNotFoundError, ImportError, RuntimeError)


def _is_ours(kind: type[Exception]) -> bool:
    return kind.__module__.split(".")[0] == __name__.split(".")[0]


def _of_the_others(outcomes: Sequence[Stopped | _Failure | None]) -> Exception | Stopped | None:
    """Return what ranks that did not fail raise, given each rank's outcome."""
    for outcome in outcomes:
        if isinstance(outcome, _Failure):
            return outcome.error()
    return next((outcome for outcome in outcomes if isinstance(outcome, Stopped)), None)
