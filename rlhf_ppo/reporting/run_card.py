"""The model card of one run: what the run knows, in the words of `model_card`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.models.unwrapping import is_peft_model, transformers_model
from rlhf_ppo.reporting.model_card import hyperparameters, installed_versions, model_card


def save_run_card(
    args: PPOConfig,
    policy: nn.Module,
    reward_sources: Sequence[str],
    metrics: Mapping[str, float],
    *,
    title: str | None,
    base_model: str | None,
    dataset: str | None,
    tags: str | Sequence[str] | None,
    license: str | None,
    language: str | None,
) -> None:
    """Write `README.md` into `output_dir`.

    Args:
        args: The run's arguments.
        policy: The policy.
        reward_sources: What `reward_origins` gives.
        metrics: The last logged values.
        title: The card's title; the last part of `hub_model_id` or `output_dir` when None.
        base_model: Hub name or path of the model that training started from; where the policy was loaded from when
            None.
        dataset: Hub name or path of the prompts.
        tags: One or several tags beside the usual ones.
        license: The licence in the card's metadata.
        language: The language in the card's metadata.
    """
    output_dir = Path(str(args.output_dir))
    card = model_card(
        model_name=title or Path(args.hub_model_id or output_dir.absolute()).name,
        base_model=base_model or _origin(policy),
        dataset=dataset,
        reward_sources=reward_sources,
        hyperparameters=hyperparameters(args),
        metrics=metrics,
        versions=installed_versions(),
        tags=[tags] if isinstance(tags, str) else list(tags or []),
        library_name="peft" if is_peft_model(policy) else "transformers",
        license=license,
        language=language,
    )
    card.save(output_dir / "README.md")


def reward_origins(models: Sequence[nn.Module], names: Sequence[str]) -> list[str]:
    """Name reward sources by where they come from.

    Args:
        models: The reward models.
        names: The names of all sources, those of the models first.

    Returns:
        The path or hub name of each model, if it has one, and else the source's name.
    """
    origins = [_origin(model) for model in models]
    return [origin or name for origin, name in zip(origins, names, strict=False)] + list(names[len(origins) :])


def _origin(model: nn.Module) -> str | None:
    """Return the path or hub name that a model was loaded from, if any."""
    return transformers_model(model).config._name_or_path or None
