"""Tables of samples: which prompts are answered, and what is done with the answers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from transformers.trainer_utils import has_length

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.evaluation.completions import is_due, sample_rows, show_table, table_of
from rlhf_ppo.generation.transformers_engine import greedy_config

if TYPE_CHECKING:
    import pandas as pd


class PrintsSamples:
    """Gives a `PPOTrainer` its tables of samples."""

    @torch.no_grad()
    def generate_completions(self: Any, sampling: bool = False) -> pd.DataFrame | None:
        """Respond greedily to prompts; print the table, save it and send it to the trackers in `report_to`.

        The prompts are held-out ones, those of `eval_dataset`; without it one batch of training prompts: the first
        rows, or those of a stream's latest update. The table's title says which.

        Args:
            sampling: Whether to stop after one batch.

        Returns:
            One row per prompt: query, model response, score, and each reward when there are several; on rank 0 also
            in `output_dir/_samples/`. None before the first update on a stream without an evaluation data set.
        """
        rows: list[dict[str, Any]] = []
        held_out = self.eval_dataset is not None
        gather = partial(self.accelerator.gather_for_metrics, use_gather_object=True) if held_out else gather_object
        config = greedy_config(self.args, self.tokens.stop, self._vocabulary.never_sampled)
        with self._apart_from_training() as model:
            for prompts in self._sample_batches():
                responses = self._generate(model, prompts, config)
                prompts = self._with_opponents(model, prompts)
                scores = self.score_responses(responses, prompts)
                table = sample_rows(self._tokenizer, prompts, responses, scores, self._logged.drain_columns())
                rows += gather(table)
                if sampling:
                    break
        self._metrics_of_reward_functions()
        if not rows:
            return None
        table = table_of(rows, self.scorer.names)
        if self.is_world_process_zero():
            show_table(table, self, held_out)
        return table

    def _sample_completions_if_due(self: Any) -> None:
        if is_due(self.state.global_step, self.state.max_steps, self.args.num_sample_generations):
            self.generate_completions(sampling=True)

    def _sample_batches(self: Any) -> Iterator[Prompts]:
        """Yield all held-out prompts in batches; where there are none, one batch of training prompts.

        These are the first rows, or a stream's latest ones: a stream may not bear being read twice at a time.
        """
        if self.eval_dataset is None:
            yield from self._training_batch()
            return
        names = list(self.eval_dataset) if isinstance(self.eval_dataset, dict) else [None]
        for name in names:
            for batch in self.get_eval_dataloader(name):
                yield Prompts.from_collated(batch, self.args.device)

    def _training_batch(self: Any) -> Iterator[Prompts]:
        num_rows, latest = self.args.eval_batch_size, self._latest_prompts
        if has_length(self.train_dataset):
            rows: Any = self.train_dataset
            num_rows = min(num_rows, len(rows) // self.accelerator.num_processes)
            first = num_rows * self.accelerator.process_index
            collate = self._get_collator_with_removed_columns(self.data_collator, "sampling")
            batch = collate([rows[index] for index in range(first, first + num_rows)])
            yield Prompts.from_collated(batch, self.args.device)
        elif latest is not None:
            yield latest.first(num_rows)
