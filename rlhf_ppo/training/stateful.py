"""Parts of a run with a state of their own, which every checkpoint keeps under their names."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from rlhf_ppo.processes.logs import get_logger

logger = get_logger(__name__)

STATEFUL_NAME = "stateful.pt"


class Stateful(Protocol):
    """Anything with a state that a resumed run goes on from."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: tensors, numbers, texts, and lists and dicts of these."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        ...


class StatefulParts:
    """The parts that are registered. The state of the main process stands for all: it is the same on every rank."""

    def __init__(self, **parts: Stateful) -> None:
        self._parts: dict[str, Stateful] = {}
        self._initial: dict[str, Mapping[str, Any]] = {}
        for name, part in parts.items():
            self.register(name, part)

    def register(self, name: str, part: Stateful) -> None:
        """Make a part's state belong to the run: saved with every checkpoint, and put back where a run resumes.

        Args:
            name: What it is called in checkpoints.
            part: The part; a run that starts anew starts from the state that it has now.

        Raises:
            TypeError: The part has no state.
            ValueError: Another part has that name.
        """
        if missing := [
            method for method in ("state_dict", "load_state_dict") if not callable(getattr(part, method, None))
        ]:
            raise TypeError(f"{name}={part!r:.60} has no {' and no '.join(missing)}; give it both methods")
        if self._parts.get(name, part) is not part:
            raise ValueError(f"a part called {name!r} is registered already; give this one another name")
        self._parts[name] = part
        self._initial[name] = copy.deepcopy(dict(part.state_dict()))

    def start(self, checkpoint: str | None, earlier: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Give every part the state of a checkpoint, or of when it was registered.

        Args:
            checkpoint: The checkpoint's directory; None where a run starts anew.
            earlier: States that the checkpoint of an earlier version keeps elsewhere, by name.

        Raises:
            ValueError: The checkpoint's file, or a state in it, cannot be read.
        """
        states = {} if checkpoint is None else {**(earlier or {}), **_read(Path(checkpoint, STATEFUL_NAME))}
        for name, part in self._parts.items():
            if not self._initial[name]:  # it has none, whatever another part of that name had
                continue
            state = states.pop(name, self._initial[name])
            try:
                part.load_state_dict(copy.deepcopy(state))
            except Exception as error:
                raise ValueError(
                    f"the state of {name!r} in {checkpoint} does not fit {part!r:.60}: {error!r}"
                ) from error
        if states:
            logger.warning(
                f"{checkpoint} keeps a state of {sorted(states)}, which nothing of this run has; it is left out."
            )

    def save(self, directory: str) -> None:
        """Write `stateful.pt`, if any part has a state."""
        states = {name: dict(part.state_dict()) for name, part in self._parts.items()}
        if states := {name: state for name, state in states.items() if state}:
            torch.save(states, Path(directory, STATEFUL_NAME))


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    if not path.exists():
        return {}
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"its {path.name} cannot be read: {error!r:.200}") from error
