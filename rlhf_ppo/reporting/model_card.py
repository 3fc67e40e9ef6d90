"""The model card: what a policy was made from, how, and what came out."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from rlhf_ppo.config.redaction import shown_addresses
from rlhf_ppo.reporting.judgements import Judgement
from rlhf_ppo.terminal.foreign import code_span, markdown, visible

TAGS = ("rlhf_ppo", "ppo")
"""The tags of every card."""

_JUDGED, _AFTER_JUDGED = "## Judged", "## Hyper-parameters"

_HYPERPARAMETERS = (
    "total_episodes",
    "batch_size",
    "mini_batch_size",
    "num_ppo_epochs",
    "num_mini_batches",
    "learning_rate",
    "lr_scheduler_type",
    "optim",
    "max_grad_norm",
    "kl_coef",
    "kl_estimator",
    "cliprange",
    "vf_coef",
    "cliprange_value",
    "gamma",
    "lam",
    "whiten_rewards",
    "missing_eos_penalty",
    "missing_eos_score",
    "score_clip",
    "reward_weights",
    "response_length",
    "stop_token",
    "stop_token_id",
    "temperature",
    "bf16",
    "fp16",
    "seed",
)
_RESULTS = ("objective/", "rewards/", "policy/", "loss/", "val/", "response/", "eval_")
_BOOKKEEPING = ("_runtime", "_per_second")
_PACKAGES = ("rlhf_ppo", "transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "torch")
_CITATIONS = """\
```bibtex
@article{schulman2017proximal,
  title   = {Proximal Policy Optimization Algorithms},
  author  = {Schulman, John and Wolski, Filip and Dhariwal, Prafulla and Radford, Alec and Klimov, Oleg},
  year    = {2017},
  journal = {arXiv preprint arXiv:1707.06347}
}
@article{huang2024nplus,
  title   = {The N+ Implementation Details of {RLHF} with {PPO}: A Case Study on {TL;DR} Summarization},
  author  = {Huang, Shengyi and Noukhovitch, Michael and Hosseini, Arian and Rasul, Kashif and Wang, Weixun and
             Tunstall, Lewis},
  year    = {2024},
  journal = {arXiv preprint arXiv:2403.17031}
}
@article{ziegler2019finetuning,
  title   = {Fine-Tuning Language Models from Human Preferences},
  author  = {Ziegler, Daniel M. and Stiennon, Nisan and Wu, Jeffrey and Brown, Tom B. and Radford, Alec and
             Amodei, Dario and Christiano, Paul and Irving, Geoffrey},
  year    = {2019},
  journal = {arXiv preprint arXiv:1909.08593}
}
@software{trl,
  title   = {{TRL: Transformers Reinforcement Learning}},
  author  = {von Werra, Leandro and Belkada, Younes and Tunstall, Lewis and Beeching, Edward and Thrush, Tristan and
             Lambert, Nathan and Huang, Shengyi and Rasul, Kashif and Gallouédec, Quentin},
  license = {Apache-2.0},
  url     = {https://github.com/huggingface/trl},
  year    = {2020}
}
@software{rlhf_ppo,
  title   = {{rlhf_ppo: PPO for language models as a transformers.Trainer}},
  version = {VERSION}
}
```"""


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
    library_name: str = "transformers",
    license: str | None = None,
    language: str | None = None,
) -> ModelCard:
    """Write the card of a policy; `card.save(path)` puts it in a file.

    Args:
        model_name: The card's title.
        base_model: Hub name or path of the model that training started from.
        dataset: Hub name or path of the prompts.
        reward_sources: Names of the reward models and functions.
        hyperparameters: Name to value, see `hyperparameters`.
        metrics: Name to final value, see `FinalMetrics`.
        versions: Package to version, see `installed_versions`.
        curves: The picture of the run's curves, beside the card.
        judgements: What judges found, see `found_judgements`.
        tags: Tags beside `TAGS`.
        library_name: The library that loads the model: `"transformers"`, or `"peft"` for an adapter.
        license: The licence in the card's metadata.
        language: The language in the card's metadata.

    Returns:
        The card; no name in it is markup. Local paths appear by their last part only, and not in the metadata that
        the hub links.
    """
    data = ModelCardData(
        base_model=_hub_id(base_model),
        datasets=_hub_id(dataset),
        library_name=library_name,
        license=license,
        language=language,
        model_name=visible(model_name, one_line=True),
        pipeline_tag="text-generation",
        tags=["generated_from_trainer", *TAGS, *(visible(tag, one_line=True) for tag in tags)],
    )
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {_line(model_name)}",
        _summary(base_model, dataset),
        "## Rewards\n\n" + ("\n".join(f"- {code_span(_last_part(name))}" for name in reward_sources) or "None named."),
        "## Final metrics\n\n" + _table("metric", {name: f"{value:.4g}" for name, value in metrics.items()}),
        *([f"## Curves\n\n![Curves of the training]({curves})"] if curves else []),
        *([_judged(judgements)] if judgements else []),
        f"{_AFTER_JUDGED}\n\n" + _table("hyper-parameter", hyperparameters),
        "## Versions\n\n" + _table("package", versions),
        "## Citations\n\n" + _CITATIONS.replace("VERSION", versions.get("rlhf_ppo", "")),
    ]
    return ModelCard("\n\n".join(sections) + "\n", ignore_metadata_errors=True)


def with_judgements(card: str, judgements: Sequence[Judgement]) -> str:
    """Put what judges have found into a card that was written before, in place of what it says of judges.

    Args:
        card: The text of a card that `model_card` has written; people may have written into it since.
        judgements: All that judges have found, see `found_judgements`.

    Returns:
        The text; as it was where there is no section behind which to put it.
    """
    start, heading, rest = card.partition(f"\n{_AFTER_JUDGED}\n")
    if not heading or not judgements:
        return card
    start = re.sub(rf"\n{_JUDGED}\n.*?(?=\n## |\Z)", "", start, flags=re.DOTALL)
    return f"{start.rstrip()}\n\n{_judged(judgements)}\n{heading}{rest}"


def hyperparameters(args: Any) -> dict[str, Any]:
    """Pick the settings that decide a run's numbers.

    Args:
        args: The run's `PPOConfig`.

    Returns:
        Name to value, without those that are None.
    """
    values = {name: getattr(args, name) for name in _HYPERPARAMETERS}
    return {name: getattr(value, "value", value) for name, value in values.items() if value is not None}


class FinalMetrics:
    """Knows the last logged values of a run's metrics; of its log, which only grows, it reads each entry once."""

    def __init__(self) -> None:
        self._log: Sequence[Mapping[str, Any]] = ()
        self._num_read = 0
        self._last: dict[str, float] = {}

    def of(self, log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Take the last logged value of every metric that says something about the policy.

        Args:
            log_history: `trainer.state.log_history`; of another list than before all is read.

        Returns:
            Name to value, in alphabetical order, without timings and counters.
        """
        if log_history is not self._log:
            self._log, self._num_read, self._last = log_history, 0, {}
        for entry in log_history[self._num_read :]:
            self._last.update((name, value) for name, value in entry.items() if _is_result(name))
        self._num_read = len(log_history)
        return dict(sorted(self._last.items()))


def _is_result(name: str) -> bool:
    return name.startswith(_RESULTS) and not name.endswith(_BOOKKEEPING)


@functools.cache
def installed_versions() -> dict[str, str]:
    """Look up the versions of the packages that decide a run's numbers, of those that are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _summary(base_model: str | None, dataset: str | None) -> str:
    start = f"from {code_span(_last_part(base_model))} " if base_model else ""
    prompts = f"on the prompts of {code_span(_last_part(dataset))} " if dataset else ""
    return (
        f"A language model trained {start}with PPO ([Schulman et al., 2017](https://arxiv.org/abs/1707.06347)) "
        f"{prompts}by rlhf_ppo."
    )


def _judged(judgements: Sequence[Judgement]) -> str:
    return f"{_JUDGED}\n\n" + "\n".join(f"- {_shown(judgement)}" for judgement in judgements)


def _shown(judgement: Judgement) -> str:
    low, high = judgement.interval
    opponent, judge = code_span(_last_part(judgement.opponent)), code_span(_last_part(judgement.judge))
    return (
        f"Win rate {judgement.win_rate:.2%} (95% interval {low:.2%} to {high:.2%}) against {opponent} on "
        f"{judgement.num_prompts} prompts, each judged in both orders by {judge}"
    )


def _table(header: str, rows: Mapping[str, Any]) -> str:
    if not rows:
        return "None logged."
    return "\n".join(
        [
            f"| {header} | value |",
            "|---|---|",
            *(f"| {_line(name)} | {_line(value)} |" for name, value in rows.items()),
        ]
    )


def _line(value: Any) -> str:
    return markdown(visible(str(value), one_line=True))


def _hub_id(name: str | None) -> str | None:
    if name is None or os.path.exists(name) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        return None
    return name


def _last_part(name: str) -> str:
    name = shown_addresses(name)
    return name if _hub_id(name) else name.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1]
