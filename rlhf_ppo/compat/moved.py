"""Import paths of earlier versions, which scripts may still have: each gives the module that holds the names now."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "rlhf_ppo.batch": ("rlhf_ppo.data.experience", "rlhf_ppo.data.rollout", "rlhf_ppo.data.prompts"),
    "rlhf_ppo.cli.evaluate": ("rlhf_ppo.cli.judge", "rlhf_ppo.evaluation.win_rate", "rlhf_ppo.evaluation.answering"),
    "rlhf_ppo.cli.params": ("rlhf_ppo.compat.params",),
    "rlhf_ppo.engine_arguments": ("rlhf_ppo.config.engines",),
    "rlhf_ppo.generation.engine": ("rlhf_ppo.generation.transformers_engine",),
    "rlhf_ppo.generation.helpers": ("rlhf_ppo.compat.trl",),
    "rlhf_ppo.generation.sampled": ("rlhf_ppo.generation.protocol",),
    "rlhf_ppo.given": ("rlhf_ppo.training.checks",),
    "rlhf_ppo.inherited_arguments": ("rlhf_ppo.config.inherited",),
    "rlhf_ppo.optimization": ("rlhf_ppo.training.optimization",),
    "rlhf_ppo.reporting.estimate": ("rlhf_ppo.estimate.update", "rlhf_ppo.estimate.counting"),
    "rlhf_ppo.rewards.environments": ("rlhf_ppo.compat.environments",),
    "rlhf_ppo.sizes": ("rlhf_ppo.config.sizes",),
    "rlhf_ppo.termination": ("rlhf_ppo.processes.signals",),
}
"""Old name to the modules that hold its names now."""


class _Names(Loader):
    """Makes a module with the names of others."""

    def __init__(self, sources: Sequence[str]) -> None:
        self.sources = sources

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        for source in self.sources:
            names = vars(import_module(source)).items()
            vars(module).update({name: value for name, value in names if not name.startswith("__")})


class MovedModules(MetaPathFinder):
    """Finds the old names of modules that have moved."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to make the module, if `fullname` is an old name."""
        sources = MOVED.get(fullname)
        return None if sources is None else ModuleSpec(fullname, _Names(sources))


def find_moved_modules() -> None:
    """Let old names be imported; asked after all other finders, so that it costs nothing."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
