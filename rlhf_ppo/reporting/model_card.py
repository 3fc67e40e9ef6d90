"""The model card of a policy: its base model, rewards, metrics, judgements, hyper-parameters and citations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import nn

from rlhf_ppo.checkpoints.files import write_text
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.models.unwrapping import is_peft_model, transformers_model
from rlhf_ppo.reporting.judgements import Judgement, found_judgements
from rlhf_ppo.reporting.run_log import installed_versions, training_log
from rlhf_ppo.terminal import code_span, markdown, redact_urls, redacted, visible

TAGS = ("rlhf_ppo", "ppo")
"""The tags of every card."""

_JUDGED, _AFTER_JUDGED = "## Judged", "## Hyper-parameters"

_HYPERPARAMETERS = (
    "total_episodes batch_size mini_batch_size num_ppo_epochs num_mini_batches learning_rate lr_scheduler_type optim "
    "max_grad_norm kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam whiten_rewards "
    "missing_eos_penalty missing_eos_score score_clip reward_weights response_length stop_token stop_token_id "
    "temperature bf16 fp16 seed"
).split()
_RESULTS = ("objective/", "rewards/", "policy/", "loss/", "val/", "response/", "eval_")
_BOOKKEEPING = ("_runtime", "_per_second")
_TEMPLATE = Path(__file__).with_name("model_card.md.jinja")


def model_card(
    *,
    model_name: str,
    base_model: str | None,
    dataset: str | None,
    reward_sources: Sequence[str],
    hyperparameters: Mapping[str, Any],
    metrics: Mapping[str, float],
    versions: Mapping[str, str],
    curves: str | None = None,
    judgements: Sequence[Judgement] = (),
    tags: Iterable[str] = (),
    **metadata: Any,
) -> ModelCard:
    """Make the card of a policy; `card.save(path)` writes it.

    Args:
        model_name: The card's title.
        base_model: Hub name or path of the model that training started from.
        dataset: Hub name or path of the prompts.
        reward_sources: Names of the reward models and functions.
        hyperparameters: Name to value, see `hyperparameters`.
        metrics: Name to final value, see `final_metrics`.
        versions: Package to version, see `installed_versions`.
        curves: File name of the run's curves, in the card's directory.
        judgements: Win rates, see `found_judgements`.
        tags: Tags in addition to `TAGS`.
        **metadata: `library_name` (default `"transformers"`), `license` and `language` of the card.

    Returns:
        The card, with names escaped. Only the last part of local paths is shown, and the metadata that the hub links
        has none.
    """
    data = ModelCardData(
        base_model=_hub_id(base_model),
        datasets=_hub_id(dataset),
        model_name=visible(model_name, one_line=True),
        pipeline_tag="text-generation",
        tags=["generated_from_trainer", *TAGS, *(visible(tag, one_line=True) for tag in tags)],
        **{"library_name": "transformers", **metadata},
    )
    return ModelCard.from_template(
        data,
        str(_TEMPLATE),
        title=_line(model_name),
        start=f"from {code_span(_last_part(base_model))} " if base_model else "",
        prompts=f"on the prompts of {code_span(_last_part(dataset))} " if dataset else "",
        rewards="\n".join(f"- {code_span(_last_part(name))}" for name in reward_sources) or "None named.",
        metrics=_table("metric", {name: f"{value:.4g}" for name, value in metrics.items()}),
        curves=curves,
        judged=_judged(judgements) if judgements else "",
        hyperparameters=_table("hyper-parameter", hyperparameters),
        versions=_table("package", versions),
        version=versions.get("rlhf_ppo", ""),
    )


def with_judgements(card: str, judgements: Sequence[Judgement]) -> str:
    """Replace the section of win rates in an existing card.

    Args:
        card: The text of a card of `model_card`, which people may have edited.
        judgements: All win rates, see `found_judgements`.

    Returns:
        The new text, or the old text if there is no place for the section.
    """
    start, heading, rest = card.partition(f"\n{_AFTER_JUDGED}\n")
    if not heading or not judgements:
        return card
    start = re.sub(rf"\n{_JUDGED}\n.*?(?=\n## |\Z)", "", start, flags=re.DOTALL)
    return f"{start.rstrip()}\n\n{_judged(judgements)}\n{heading}{rest}"


def hyperparameters(args: Any) -> dict[str, Any]:
    """Return the arguments that affect a run's numbers.

    Args:
        args: The run's `PPOConfig`.

    Returns:
        Name to value, without None.
    """
    values = {name: getattr(args, name) for name in _HYPERPARAMETERS}
    return {name: getattr(value, "value", value) for name, value in values.items() if value is not None}


def final_metrics(log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the last value of every metric of the policy, in alphabetical order, without timings and counters."""
    found = {name: value for entry in log_history for name, value in entry.items()}
    of_policy = (name for name in found if name.startswith(_RESULTS) and not name.endswith(_BOOKKEEPING))
    return {name: found[name] for name in sorted(of_policy)}


def _judged(judgements: Sequence[Judgement]) -> str:
    lines = [
        f"- Win rate {each.win_rate:.2%} (95% interval {each.interval[0]:.2%} to {each.interval[1]:.2%}) against "
        f"{code_span(_last_part(each.opponent))} on {each.num_prompts} prompts, each judged in both orders by "
        f"{code_span(_last_part(each.judge))}"
        for each in judgements
    ]
    return "\n".join([f"{_JUDGED}\n", *lines])


def _table(header: str, rows: Mapping[str, Any]) -> str:
    if not rows:
        return "None logged."
    lines = (f"| {_line(name)} | {_line(value)} |" for name, value in rows.items())
    return "\n".join([f"| {header} | value |", "|---|---|", *lines])


def _line(value: Any) -> str:
    return markdown(visible(str(value), one_line=True))


def _hub_id(name: str | None) -> str | None:
    if name is None or os.path.exists(name) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        return None
    return name


def _last_part(name: str) -> str:
    name = redact_urls(name)
    return name if _hub_id(name) else name.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]


# The card of a run

CARD = "README.md"

CURVES = "curves.png"
"""File name of the curves in the card's directory."""

NUM_CURVES = 4
"""Number of curves: the first of `PANELS` that were logged."""


def save_run_card(
    args: PPOConfig,
    policy: nn.Module,
    rewards: Sequence[str],
    log: Sequence[Any],
    *,
    title: str | None,
    dataset: str | None,
    tags: str | Sequence[str] | None,
    with_curves: bool,
    finetuned_from: str | None = None,
    license: str | None = None,
    language: str | None = None,
) -> None:
    """Write a run's card to `output_dir`.

    Args:
        args: The run's arguments.
        policy: The policy.
        rewards: The rewards' origins, see `reward_origins`.
        log: The run's log history.
        title: The card's title; None takes the last part of `hub_model_id` or `output_dir`.
        dataset: Hub name or path of the prompts.
        tags: One or several additional tags.
        with_curves: Whether to draw the curves again, which takes half a second; otherwise the card shows existing
            ones, if any.
        finetuned_from: Hub name or path of the model that training started from; None takes the policy's origin.
        license: The licence in the card's metadata.
        language: The language in the card's metadata.
    """
    output_dir = Path(str(args.output_dir))
    if with_curves:
        _draw(log, output_dir / CURVES)
    card = model_card(
        model_name=title or Path(args.hub_model_id or output_dir.absolute()).name,
        base_model=finetuned_from or model_origin(policy),
        dataset=dataset,
        reward_sources=rewards,
        hyperparameters=hyperparameters(args),
        metrics=final_metrics(log),
        versions=installed_versions(),
        curves=CURVES if (output_dir / CURVES).exists() else None,
        judgements=found_judgements(output_dir),
        tags=[tags] if isinstance(tags, str) else list(tags or []),
        library_name="peft" if is_peft_model(policy) else "transformers",
        license=license,
        language=language,
    )
    write_text(output_dir / CARD, f"{card}\n")


def show_judgements(output_dir: str | Path) -> Path | None:
    """Add the current win rates to the card of a run.

    Returns:
        The card's path; None if there is no card, or nothing has changed.
    """
    path, found = Path(output_dir, CARD), found_judgements(output_dir)
    if not found or not path.is_file():
        return None
    card = path.read_text(encoding="utf-8")
    if (judged := with_judgements(card, found)) == card:
        return None
    write_text(path, judged)
    return path


def _draw(log: Sequence[Any], path: Path) -> None:
    from rlhf_ppo.reporting.plots import PANELS, plot_metrics  # Matplotlib takes a second to import

    entries = training_log(log)
    logged = [name for name in PANELS if any(name in entry and "episode" in entry for entry in entries)]
    if logged:
        plot_metrics([log], path, logged[:NUM_CURVES])


def reward_origins(models: Sequence[nn.Module], names: Sequence[str]) -> list[str]:
    """Return the origins of reward sources.

    Args:
        models: The reward models.
        names: The names of all sources, the models' first.

    Returns:
        The path or hub name of each model, if it has one, or else the source's name.
    """
    origins = [model_origin(model) for model in models]
    return [origin or name for origin, name in zip(origins, names, strict=False)] + list(names[len(origins) :])


def names_of_parts(
    policy: nn.Module,
    reference: nn.Module | None,
    reward_models: Sequence[nn.Module],
    names: Sequence[str],
    reward_funcs: Any,
    dataset: str | None,
) -> dict[str, Any]:
    """Return the parts of a run, as `RunSettings.made_of` records them.

    Args:
        policy: The policy.
        reference: The separate reference, if there is one; recorded if it is another model than the policy was.
        reward_models: The reward models.
        names: The names of all reward sources.
        reward_funcs: The reward functions, as the trainer was given them; texts are recorded, without secrets.
        dataset: Hub name or path of the prompts, if known.
    """
    given = reward_funcs if isinstance(reward_funcs, list | tuple) else [] if reward_funcs is None else [reward_funcs]
    texts = [each if isinstance(each, str) and redacted(each) == each else None for each in given]
    found = {"policy": model_origin(policy), "rewards": reward_origins(reward_models, names)}
    others = {"reward_funcs": texts, "dataset": redacted(dataset)}
    if reference is not None and (origin := model_origin(reference)) != found["policy"]:
        found["reference"] = origin
    return found | {name: value for name, value in others.items() if value}


def model_origin(model: nn.Module) -> str | None:
    """Return the path or hub name that a model was loaded from, if any."""
    return transformers_model(model).config._name_or_path or None
