"""Presets: named sets of options, each of which an explicit option overrides."""

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import yaml

from rlhf_ppo.config.arguments import GSPO_CLIP_RANGES
from rlhf_ppo.config.validation import ExplainsUnknown
from rlhf_ppo.config.validation import option as _option

PRESETS: Mapping[str, dict[str, Any]] = MappingProxyType(
    yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"))
)
"""Options of each preset, by name; docs/recipes.md gives their sources."""


_EXCLUDED = {"missing_eos_penalty": "missing_eos_score", "stop_token_id": "stop_token", "warmup_ratio": "warmup_steps"}
"""Option: the option of a preset that it excludes."""


class RemembersNames(ExplainsUnknown):
    """Base of a dataclass that records which of its arguments were given."""

    _named: Collection[str] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the given options."""
        made = super().__new__(cls, *args, **kwargs)
        made._named = {*list(inspect.signature(cls).parameters)[: len(args)], *kwargs}
        return made

    def was_given(self, name: str) -> bool:
        """Return whether the constructor was given an argument."""
        return name in self._named

    def set_given(self, names: Collection[str]) -> None:
        """Record which arguments a parser was given; it passes all of them to the constructor."""
        self._named = names


@dataclass(repr=False)
class PresetArguments(RemembersNames):
    """The `preset` argument, whose options replace the defaults of a derived dataclass."""

    preset: Literal["trl", "nplus", "aitraining", "recommended", "reasoning", "sao"] | None = _option(
        None,
        "Recipe that sets the defaults of several options; they are printed when training starts. 'trl': TRL's PPO; "
        "'nplus': arXiv 2403.17031 (N+ implementation details); 'aitraining': AITraining's PPO; 'recommended': TRL's "
        "with a faster value model; 'reasoning': rule rewards without a KL penalty; 'sao': arXiv 2607.07508. Your "
        "own options win.",
    )

    def resolve_preset(self) -> None:
        """Set the options that were not given to the preset's values.

        Raises:
            ValueError: A parser that does not support presets has passed all options.
        """
        if not isinstance(self.preset, str) or self.preset not in PRESETS:
            return  # None, or a value that the type check rejects
        defaults = {field.name: field.default for field in fields(self)}
        changes = {name: value for name, value in PRESETS[self.preset].items() if value != defaults[name]}
        if changes and {*defaults} <= {*self._named} and all(getattr(self, name) != changes[name] for name in changes):
            raise ValueError(
                f"preset={self.preset!r} has changed nothing, because the parser gave every option; parse with "
                "rlhf_ppo.cli.arguments.PPOArgumentParser (a TrlParser), or make PPOConfig(preset=...) in Python"
            )
        for name, value in preset_options(self.preset, self._named).items():
            setattr(self, name, value)

    @contextmanager
    def explaining_preset(self) -> Iterator[None]:
        """Add to an error which of the options that it names come from the preset.

        Raises:
            ValueError: The error of the block.
        """
        try:
            yield
        except ValueError as error:
            options = PRESETS[self.preset] if self.preset in [*PRESETS] else {}
            taken = [name for name, value in options.items() if getattr(self, name) == value]
            blamed = [name for name in taken if re.search(rf"\b{name}=", str(error))]
            if not blamed:
                raise
            raise ValueError(f"{error} ({', '.join(blamed)}: of preset={self.preset!r})") from error


def preset_options(preset: str, named: Collection[str]) -> dict[str, Any]:
    """Return the options that a preset sets.

    Args:
        preset: Name of the preset.
        named: The given options; neither they nor the options that they exclude are set.
    """
    given = {*named, *(_EXCLUDED[name] for name in named if name in _EXCLUDED)}
    return {name: value for name, value in PRESETS[preset].items() if name not in given}


def describe_preset(args: PresetArguments) -> str | None:
    """Return a text with a run's preset, its options, and the overridden ones with the reason; None without one."""
    if args.preset is None:
        return None
    options = PRESETS[args.preset]
    taken = [f"{name}={value}" for name, value in options.items() if getattr(args, name) == value]
    others: dict[str, list[str]] = {"given beside it": [], "of policy_loss='gspo'": []}
    for name, value in options.items():
        if (found := getattr(args, name)) != value:
            is_gspos = getattr(args, "policy_loss", None) == "gspo" and GSPO_CLIP_RANGES.get(name) == found
            others["of policy_loss='gspo'" if is_gspos else "given beside it"].append(f"{name}={found} (not {value})")
    beside = [f"; {reason}: {', '.join(values)}" for reason, values in others.items() if values]
    return f"Preset {args.preset}: {', '.join(taken)}{''.join(beside)}"
