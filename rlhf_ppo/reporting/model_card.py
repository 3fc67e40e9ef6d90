"""The model card of a policy: TRL's, with rewards, final metrics, settings, curves and win rates."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import is_wandb_available

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.files import optional, write_text
from rlhf_ppo.models.adapters import origin
from rlhf_ppo.models.capabilities import reads_images
from rlhf_ppo.models.unwrapping import is_peft_model, transformers_model
from rlhf_ppo.reporting.judgements import Judgement, read_judgements
from rlhf_ppo.reporting.run_log import CURVES, SETTINGS_NAME, History, installed_versions, training_log
from rlhf_ppo.rewards.identity import reward_identities
from rlhf_ppo.rewards.resolve import RewardSpec
from rlhf_ppo.terminal import redact_urls, redacted

TAGS = ("rlhf_ppo", "ppo")
"""The tags of every card."""

CARD = "README.md"
"""File name of the card."""

NUM_CURVES = 4
"""Number of curves: the first of `PANELS` that were logged."""

_JUDGED = "\n## Judged\n"
_SETTINGS = (
    "total_episodes batch_size mini_batch_size num_ppo_epochs num_mini_batches learning_rate lr_scheduler_type optim "
    "max_grad_norm kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam whiten_rewards "
    "missing_eos_penalty missing_eos_score score_clip reward_weights response_length stop_token stop_token_id "
    "temperature bf16 fp16 seed"
).split()
_RESULTS = ("objective/", "rewards/", "policy/", "loss/", "val/", "response/", "eval_")
_BOOKKEEPING = ("_runtime", "_per_second")
_CITATION = """\
@article{schulman2017proximal,
  title   = {Proximal Policy Optimization Algorithms},
  author  = {Schulman, John and Wolski, Filip and Dhariwal, Prafulla and Radford, Alec and Klimov, Oleg},
  year    = {2017},
  journal = {arXiv preprint arXiv:1707.06347}
}"""


@optional("The model card")
def save_run_card(
    args: PPOConfig,
    policy: nn.Module,
    rewards: Sequence[str],
    log: History,
    step: int,
    *,
    model_name: str | None,
    dataset_name: str | None,
    tags: str | Sequence[str] | None,
    with_curves: bool,
    reads_chats: bool,
    finetuned_from: str | None = None,
    **others: str | None,
) -> None:
    """Write a run's card to `output_dir`.

    Args:
        args: The run's arguments.
        policy: The policy.
        rewards: The rewards' origins, see `reward_origins`.
        log: The run's log history.
        step: The update whose policy is saved, for the final metrics.
        model_name: The card's title; None takes the last part of `hub_model_id` or `output_dir`.
        dataset_name: Hub name or path of the prompts; a path is not shown.
        tags: Additional tags.
        with_curves: Whether to draw the curves again, which takes half a second.
        reads_chats: Whether the example is a conversation, for which the tokenizer needs a chat template.
        finetuned_from: Hub name or path of the model that training started from; None takes the policy's origin.
        **others: Trainer's other arguments; the card has their `license` and `language`.
    """
    from trl.trainer.utils import generate_model_card, get_comet_experiment_url, get_trackio_space_url

    output_dir, until = Path(str(args.output_dir)), [entry for entry in log if entry.get("step", 0) <= step]
    base, name = finetuned_from or model_origin(policy), output_dir.absolute().name
    card = generate_model_card(
        base_model=if_on_hub(base),
        model_name=model_name or (args.hub_model_id or name).split("/")[-1],
        hub_model_id=args.hub_model_id or f"path/to/{name}",
        dataset_name=if_on_hub(dataset_name),
        tags=[*TAGS, *([tags] if isinstance(tags, str) else tags or [])],
        wandb_url=_wandb_url(),
        trackio_url=get_trackio_space_url(),
        comet_url=get_comet_experiment_url(),
        trainer_name="PPO",
        trainer_citation=_CITATION,
        paper_title="Proximal Policy Optimization Algorithms",
        paper_id="1707.06347",
    )
    stated = {name: others[name] for name in ("language", "license") if name in others}
    library = {"library_name": "peft"} if is_peft_model(policy) else {}
    task = "image-text-to-text" if reads_images(policy) else "text-generation"
    vars(card.data).update({"pipeline_tag": task, **stated, **library})
    if with_curves:
        _draw(log, output_dir / CURVES)
    ours = f"using rlhf_ppo {installed_versions().get('rlhf_ppo', '')}"
    card.text = card.text.replace("using [TRL](https://github.com/huggingface/trl)", ours)
    card.text = with_local_names(card.text, name, base, dataset_name) + _sections(args, rewards, until, output_dir)
    if not reads_chats:
        card.text = card.text.replace('[{"role": "user", "content": question}]', "question", 1)
    if args.stop_strings:  # transformers looks for them with the tokenizer
        card.text = card.text.replace("max_new_tokens=128", "max_new_tokens=128, tokenizer=generator.tokenizer", 1)
    write_text(output_dir / CARD, str(card))


def _sections(args: PPOConfig, rewards: Sequence[str], log: History, output_dir: Path) -> str:
    """Return the sections that follow TRL's text: rewards, metrics, settings, curves and a judge's verdict."""
    sections = {
        "Rewards": "\n".join(f"- `{_last_part(name)}`" for name in rewards),
        "Final metrics": _table("metric", {name: f"{value:.4g}" for name, value in final_metrics(log).items()}),
        "Settings": _table("setting", _settings(args)),
    }
    if (output_dir / CURVES).exists():
        sections["Curves"] = f"![Curves of the training]({CURVES})"
    text = "".join(f"\n## {title}\n\n{body}\n" for title, body in sections.items())
    return text + _judged(read_judgements(output_dir))


def with_local_names(card: str, name: str, base: str | None, dataset: str | None) -> str:
    """Return TRL's card with the names of local models and files, instead of links to what is not on the hub.

    Args:
        card: The text.
        name: Name of the run's directory.
        base: Hub name or path of the model that training started from, if known.
        dataset: Hub name or path of the training data, if known.
    """
    data = f" on the {_linked(dataset, 'datasets/')} dataset" if dataset else ""
    start = f"This model is a fine-tuned version of {_linked(base) if base else 'a model made in Python'}{data}."
    card = re.sub("This model is a fine-tuned version of .*", lambda _: start, card, count=1)
    return card.replace('model="None"', f'model="path/to/{name}"')


def show_judgements(output_dir: str | Path) -> Path | None:
    """Add the current win rates to the card of a run, in place of earlier ones.

    Returns:
        The card's path; None if the directory is no run's or has no card, or nothing has changed.
    """
    path, judgements = Path(output_dir, CARD), read_judgements(output_dir)
    if not judgements or not path.is_file() or not Path(output_dir, SETTINGS_NAME).is_file():
        return None
    card = path.read_text(encoding="utf-8")
    before, _, after = card.partition(_JUDGED)
    others = "".join(after.partition("\n## ")[1:])  # sections that somebody added
    if (judged := before + _judged(judgements) + others) == card:
        return None
    write_text(path, judged)
    return path


def final_metrics(log_history: History) -> dict[str, float]:
    """Return the last value of every metric of the policy, in alphabetical order, without timings and counters."""
    last = {name: value for entry in log_history for name, value in entry.items()}
    of_policy = (name for name in last if name.startswith(_RESULTS) and not name.endswith(_BOOKKEEPING))
    return {name: last[name] for name in sorted(of_policy)}


def _settings(args: PPOConfig) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in _SETTINGS}
    return {name: getattr(value, "value", value) for name, value in values.items() if value is not None}


def _judged(judgements: Sequence[Judgement]) -> str:
    lines = [
        f"- Win rate {judged.win_rate:.2%} (95% interval {judged.interval[0]:.2%} to {judged.interval[1]:.2%}) "
        f"against `{_last_part(judged.opponent)}` on {judged.num_prompts} prompts, each judged in both orders "
        f"by `{_last_part(judged.judge)}`"
        for judged in judgements
    ]
    return "\n".join([_JUDGED, *lines, ""]) if lines else ""


def _table(header: str, rows: Mapping[str, object]) -> str:
    lines = (f"| {name} | {redacted(str(value))} |" for name, value in rows.items())
    return "\n".join([f"| {header} | value |", "|---|---|", *lines])


def if_on_hub(name: str | None) -> str | None:
    """Return a name if it may be one of the hub; None for a local path."""
    is_hub_id = name is not None and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not os.path.exists(name)
    return name if is_hub_id else None


def _linked(name: str, kind: str = "") -> str:
    """Return a name, with a link if it may be one of the hub; without its folders and an URL's secrets else."""
    on_hub = if_on_hub(name)
    return f"[{name}](https://huggingface.co/{kind}{name})" if on_hub else f"`{Path(redact_urls(name)).name}`"


def _last_part(name: str) -> str:
    """Return the last part of a local path; other names without the secrets of URLs."""
    return os.path.basename(name.rstrip("/")) if os.path.exists(name) else redact_urls(name)


def _wandb_url() -> str | None:
    if not is_wandb_available():
        return None
    import wandb

    return None if wandb.run is None else wandb.run.url


def _draw(log: History, path: Path) -> None:
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
    origins = [origin(model) for model in models]
    return [known or name for known, name in zip(origins, names, strict=False)] + list(names[len(origins) :])


def names_of_parts(
    policy: nn.Module,
    reference: nn.Module | None,
    reward_models: Sequence[nn.Module],
    weights: Mapping[str, float],
    reward_funcs: RewardSpec | Sequence[RewardSpec] | None,
    dataset: str | None,
) -> dict[str, Any]:
    """Return the parts of a run, as `RunSettings.made_of` records them.

    Args:
        policy: The policy.
        reference: The separate reference, if there is one; recorded if it is not the initial policy.
        reward_models: The reward models.
        weights: The weight of each reward source by name.
        reward_funcs: The reward functions, as the trainer was given them; texts are recorded, without secrets.
        dataset: Hub name or path of the prompts, if known.
    """
    specs = reward_funcs if isinstance(reward_funcs, list | tuple) else [] if reward_funcs is None else [reward_funcs]
    texts = [spec if isinstance(spec, str) and redacted(spec) == spec else None for spec in specs]
    parts = {"policy": origin(policy), "rewards": reward_origins(reward_models, list(weights))}
    others = {
        "reward_funcs": texts,
        "reward_identities": reward_identities(reward_models, reward_funcs),
        "reward_weights": dict(weights) if {*weights.values()} != {1.0} else None,
        "dataset": redacted(dataset),
    }
    if reference is not None and (its_origin := origin(reference)) != parts["policy"]:
        parts["reference"] = its_origin
    return parts | {name: value for name, value in others.items() if value}


def model_origin(model: nn.Module) -> str | None:
    """Return the path or hub name of a model below its adapter, if any; `adapters.origin` names the adapter."""
    return transformers_model(model).config._name_or_path or None
