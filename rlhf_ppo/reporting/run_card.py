"""The model card of one run: what the run knows, in the words of `model_card`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from rlhf_ppo.checkpoints.jsonfile import write_text
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.models.unwrapping import is_peft_model, transformers_model
from rlhf_ppo.reporting.judgements import found_judgements
from rlhf_ppo.reporting.model_card import (
    FinalMetrics,
    hyperparameters,
    installed_versions,
    model_card,
    with_judgements,
)
from rlhf_ppo.rewards.scorer import Scorer

CARD = "README.md"

CURVES = "curves.png"
"""The picture beside the card."""

NUM_CURVES = 4
"""Metrics that it shows, the first of `PANELS` that were logged."""


class CardedRun(Protocol):
    """What a model card says of a trainer."""

    args: PPOConfig
    policy_model: nn.Module
    reward_models: list[nn.Module]
    scorer: Scorer
    state: Any
    _final_metrics: FinalMetrics


def save_run_card(
    run: CardedRun,
    title: str | None,
    dataset: str | None,
    tags: str | Sequence[str] | None,
    *,
    with_curves: bool,
    finetuned_from: str | None = None,
    license: str | None = None,
    language: str | None = None,
) -> None:
    """Write `CARD` into `output_dir`.

    Args:
        run: The trainer.
        title: The card's title; the last part of `hub_model_id` or `output_dir` when None.
        dataset: Hub name or path of the prompts.
        tags: One or several tags beside the usual ones.
        with_curves: Whether to draw them again, which takes half a second; else those of before are shown, if any.
        finetuned_from: Hub name or path of the model that training started from; where the policy was loaded from
            when None.
        license: The licence in the card's metadata.
        language: The language in the card's metadata.
    """
    args, policy, output_dir = run.args, run.policy_model, Path(str(run.args.output_dir))
    card = model_card(
        model_name=title or Path(args.hub_model_id or output_dir.absolute()).name,
        base_model=finetuned_from or _origin(policy),
        dataset=dataset,
        reward_sources=reward_origins(run.reward_models, run.scorer.names),
        hyperparameters=hyperparameters(args),
        metrics=run._final_metrics.of(run.state.log_history),
        versions=installed_versions(),
        curves=_curves(run.state.log_history, output_dir, with_curves),
        judgements=found_judgements(output_dir),
        tags=[tags] if isinstance(tags, str) else list(tags or []),
        library_name="peft" if is_peft_model(policy) else "transformers",
        license=license,
        language=language,
    )
    write_text(output_dir / CARD, str(card))


def show_judgements(output_dir: str | Path) -> Path | None:
    """Put what judges have found since into the card of a run.

    Args:
        output_dir: The run's directory.

    Returns:
        The card; None where there is no card or nothing was found.
    """
    path, found = Path(output_dir, CARD), found_judgements(output_dir)
    if not found or not path.is_file():
        return None
    card = path.read_text(encoding="utf-8")
    if (judged := with_judgements(card, found)) == card:
        return None
    write_text(path, judged)
    return path


def _curves(log: Sequence[Any], output_dir: Path, drawn_again: bool) -> str | None:
    if drawn_again:
        _draw(log, output_dir / CURVES)
    return CURVES if (output_dir / CURVES).exists() else None


def _draw(log: Sequence[Any], path: Path) -> None:
    from rlhf_ppo.reporting.plots import PANELS, plot_metrics, training_log  # Matplotlib takes a second to import

    entries = training_log(log)  # without summaries, which are not drawn
    logged = [name for name in PANELS if any(name in entry and "episode" in entry for entry in entries)]
    if logged:
        plot_metrics([log], path, logged[:NUM_CURVES])


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


def names_of_parts(policy: nn.Module, reward_models: Sequence[nn.Module], names: Sequence[str]) -> dict[str, Any]:
    """Return what a run is made of, by where it comes from: `policy`, and `rewards` as `reward_origins` gives them."""
    return {"policy": _origin(policy), "rewards": reward_origins(reward_models, names)}


def _origin(model: nn.Module) -> str | None:
    """Return the path or hub name that a model was loaded from, if any."""
    return transformers_model(model).config._name_or_path or None
