"""Train a value model on the kept completions of runs: a warm start for PPO's critic, or a critic for decoding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from rlhf_ppo.algorithm.advantages import gae
from rlhf_ppo.algorithm.losses import explained_variance, hl_gauss_value_loss
from rlhf_ppo.data.prompts import left_padded
from rlhf_ppo.models.heads import ValueHead, of_own_heads, value_head_of
from rlhf_ppo.models.packing import pack_rows
from rlhf_ppo.models.policy_and_value import response_values
from rlhf_ppo.models.unwrapping import is_peft_model, transformers_model
from rlhf_ppo.reporting.completion_files import COMPLETIONS_DIR, find_completions, read_completions

Example = dict[str, Any]
"""`number`, `prompt_id`, `token_id`, and for each response token `token_written` and `returns` (0 for others)."""


def examples_of(directories: Sequence[str | Path], gamma: float = 1.0, lam: float = 0.95) -> list[Example]:
    """Read the kept completions of runs, with the return of each token.

    Args:
        directories: Output directories of runs with `num_completions_to_keep`, or their `completions` directories.
        gamma: Discount per token, that of the runs.
        lam: Lambda of the returns. Below 1 they build on the values that the runs' own critics gave (`token_value`);
            1 sums up rewards alone.

    Returns:
        An example for each completion with a score, in the order of runs and updates.

    Raises:
        ValueError: A directory holds no completions, or a file is damaged.
    """
    examples: list[Example] = []
    for directory in directories:
        path = Path(directory)
        files = find_completions(path.parent if path.name == COMPLETIONS_DIR else path)
        if not files:
            raise ValueError(f"completions={str(directory)!r} holds none; train with num_completions_to_keep")
        rows = (row for file in files.values() for row in read_completions(file))
        examples += [_example(row, gamma, lam) for row in rows if row["score"] is not None]
    return [{"number": number} | each for number, each in enumerate(examples)]


def _example(row: Mapping[str, Any], gamma: float, lam: float) -> Example:
    written = torch.tensor([row["token_written"]])
    rewards, values = (
        torch.tensor([[value or 0.0 for value in row[name]]]) for name in ("token_reward", "token_value")
    )
    returns = gae(rewards, values, written, gamma, lam)[1][0].tolist()
    return {name: row[name] for name in ("prompt_id", "token_id", "token_written")} | {"returns": returns}


def collate(examples: Iterable[Example]) -> dict[str, Tensor]:
    """Pad examples: prompts on the left, responses on the right.

    Returns:
        `query_responses`, long `(B, C + T)`; `attention_mask`, bool `(B, C + T)`; `response_mask`, bool, and
        `returns`, float32, `(B, T)`; `numbers`, long `(B,)`.
    """
    rows = list(examples)
    width = max(len(row["token_id"]) for row in rows)

    def padded(name: str, filling: Any) -> Tensor:
        return torch.tensor([[*row[name], *[filling] * (width - len(row[name]))] for row in rows])

    prompts = [row["prompt_id"] for row in rows]
    real = torch.tensor([[True] * len(row["token_id"]) + [False] * (width - len(row["token_id"])) for row in rows])
    return {
        "query_responses": torch.cat((left_padded(prompts, 0), padded("token_id", 0)), dim=1),
        "attention_mask": torch.cat((left_padded([[1] * len(each) for each in prompts], 0).bool(), real), dim=1),
        "response_mask": padded("token_written", False),
        "returns": padded("returns", 0.0),
        "numbers": torch.tensor([row["number"] for row in rows]),
    }


class CriticTrainer(Trainer):
    """Fit a value model to returns: the mean over tokens of `0.5 (V - R)^2`, or of HL-Gauss for a head with bins.

    Several heads take turns over the examples, as over the responses of a run.

    Args:
        model: A value model over the policy's tokens. A head with bins keeps its range.
        args: The arguments.
        train_dataset: Examples of `examples_of`.
        eval_dataset: Held-out examples, or None.

    Raises:
        ValueError: There are several processes.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        train_dataset: Sequence[Example],
        eval_dataset: Sequence[Example] | None = None,
        **kwargs: Any,
    ) -> None:
        if (processes := PartialState().num_processes) > 1:
            raise ValueError(f"num_processes={processes}: a critic is fitted in a single process; start only one")
        args.remove_unused_columns, args.label_names, args.prediction_loss_only = False, ["returns"], True
        pack_rows(model)
        data: dict[str, Any] = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        super().__init__(model, args, data_collator=collate, **data, **kwargs)  # pyright: ignore[reportArgumentType]

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch, a scalar in the reward's unit squared, or nats."""
        batch = (inputs["query_responses"], inputs["attention_mask"], inputs["response_mask"])
        (values, _, logits, of_heads), mask = response_values(model, *batch), inputs["response_mask"]
        learned = values
        if of_heads is not None:
            own = inputs["numbers"] % of_heads.shape[-1]
            learned, logits = of_own_heads(of_heads, own), None if logits is None else of_own_heads(logits, own)
        if logits is None:
            losses = 0.5 * (learned - inputs["returns"]).square()
        else:
            losses = hl_gauss_value_loss(
                logits, inputs["returns"], value_head_of(model).centers_on(logits.device)
            ).loss
        loss = losses[mask].mean()
        return (loss, {"values": values}) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        model: Any = self.accelerator.unwrap_model(self.model)
        if is_peft_model(model) and value_head_of(model) != ValueHead():  # an adapter does not name its head
            transformers_model(model).config.save_pretrained(str(output_dir or self.args.output_dir))

    @torch.no_grad()
    def explained_variance(self) -> float:
        """Return the share of the held-out returns' variance that the values explain; see `explained_variance`."""
        found = []
        self.model.eval()  # pyright: ignore[reportOptionalMemberAccess]
        for inputs in self.get_eval_dataloader():
            _, outputs = self.compute_loss(self.model, self._prepare_inputs(inputs), return_outputs=True)
            mask = inputs["response_mask"]
            found.append(torch.stack([outputs["values"][mask].float(), inputs["returns"][mask]]))
        values, returns = torch.cat(found, dim=1)
        return float(explained_variance(values, returns, torch.ones_like(values, dtype=torch.bool)))
