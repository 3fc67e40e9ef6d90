"""The model card of one run: what the trainer knows, in the words of `model_card`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_ppo.models.unwrapping import is_peft_model, transformers_model
from rlhf_ppo.reporting.model_card import FinalMetrics, hyperparameters, installed_versions, model_card


class WritesRunCard:
    """Gives a `PPOTrainer` the model card that `push_to_hub` and every checkpoint write.

    Attributes:
        dataset_name: Hub name or path of the prompts, which their data set does not know; scripts set it.
    """

    dataset_name: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._final_metrics = FinalMetrics()
        super().__init__(*args, **kwargs)

    def create_model_card(
        self: Any,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        *,
        language: str | None = None,
        license: str | None = None,
        finetuned_from: str | None = None,
        dataset: str | None = None,
    ) -> None:
        """Write `README.md` into `output_dir`: base model, prompts, rewards, settings, metrics, versions, citations.

        `push_to_hub` passes its keyword arguments on to here.

        Args:
            model_name: The card's title; the last part of `hub_model_id` or `output_dir` when None.
            dataset_name: Hub name or path of the prompts; the trainer's `dataset_name` when None.
            tags: One or several tags beside the usual ones.
            language: The language in the card's metadata.
            license: The licence in the card's metadata.
            finetuned_from: Hub name or path of the model that training started from; where the policy was loaded from
                when None.
            dataset: Trainer's name for `dataset_name`.
        """
        if not self.is_world_process_zero():
            return
        card = model_card(
            model_name=model_name or Path(self.args.hub_model_id or Path(self.args.output_dir).absolute()).name,
            base_model=finetuned_from or _origin(self.policy_model),
            dataset=dataset_name or dataset or self.dataset_name,
            reward_sources=_reward_names(self),
            hyperparameters=hyperparameters(self.args),
            metrics=self._final_metrics.of(self.state.log_history),
            versions=installed_versions(),
            tags=[tags] if isinstance(tags, str) else tags or [],
            library_name="peft" if is_peft_model(self.policy_model) else "transformers",
            license=license,
            language=language,
        )
        card.save(Path(self.args.output_dir, "README.md"))


def _reward_names(trainer: Any) -> list[str]:
    origins = [_origin(model) for model in trainer.reward_models]  # the models come first
    names = trainer.scorer.names
    return [origin or name for origin, name in zip(origins, names, strict=False)] + names[len(origins) :]


def _origin(model: Any) -> str | None:
    """Return the path or hub name that a model was loaded from, if any."""
    return transformers_model(model).config._name_or_path or None
