"""Evaluations and sample tables: the steps of a rollout, apart from training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlhf_ppo.data.prompts import num_rows
from rlhf_ppo.data.rollout import Prompts, Responses, Rollout
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import gathered, lent_type
from rlhf_ppo.ranks.processes import deepspeed_dtype
from rlhf_ppo.ranks.random_streams import isolated_rng
from rlhf_ppo.reporting.metrics import evaluation_columns, gather_columns, noting_out_of_memory, warn_of_unscored
from rlhf_ppo.reporting.sample_tables import sample_rows
from rlhf_ppo.rewards.scorer import Scores
from rlhf_ppo.run.rollouts import DivergenceGuard
from rlhf_ppo.run.run_state import RunState


@contextmanager
def apart_from_training(run: RunState, model: nn.Module, engine: GenerationEngine) -> Iterator[None]:
    """Let the steps use the current weights in the block, with the same separate random numbers in every call.

    Args:
        run: The run.
        model: The prepared `PolicyAndValue`, or the plain one before training.
        engine: Generates; its `policy_changed` is called, because the weights may have changed.
    """
    args = run.args
    run.check_in_step()
    engine.policy_changed()
    run.streams.num_apart = 0
    try:
        with (
            isolated_rng(args.seed, device_specific=True),
            run.streams.rewards.reseeded(args.seed, args.process_index),
            _as_in_training(model, run.accelerator),
        ):
            yield
    finally:
        run.streams.num_apart = None


@contextmanager
def _as_in_training(model: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Move a plain model, as before training, to the device; lend it weights in the type that DeepSpeed trains in."""
    if not isinstance(model, PolicyAndValue) or isinstance(model, FSDPModule):
        yield
        return
    with gathered(model.parameters()):
        model.to(accelerator.device)
        weights = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        with lent_type(weights, deepspeed_dtype(accelerator)):
            yield


def evaluate_each(
    evaluate_one: Callable[[Any, list[str] | None, str], dict[str, float]],
    prepared: Any,
    ignore_keys: list[str] | None,
    prefix: str,
) -> dict[str, float]:
    """Evaluate a prepared data set, or each of a dict of them, and return all figures.

    Trainer calls `evaluate` again for each set of a dict, which would prepare the set again.

    Args:
        evaluate_one: Evaluates a data set: Trainer's `evaluate`.
        prepared: The set; the name of one, or None, for those of the trainer.
        ignore_keys: Passed to `evaluate_one`.
        prefix: Prefix of each key; the name of a set follows.
    """
    if not isinstance(prepared, Mapping):
        return evaluate_one(prepared, ignore_keys, prefix)
    figures: dict[str, float] = {}
    for name, dataset in prepared.items():
        figures |= evaluate_one(dataset, ignore_keys, f"{prefix}_{name}")
    return figures


def evaluate(
    run: RunState,
    batches: Iterable[Mapping[str, object]],
    collect: Callable[[Prompts], Rollout],
    guard: DivergenceGuard,
) -> dict[str, Tensor]:
    """Collect a rollout for every batch of held-out prompts.

    Args:
        run: The run.
        batches: Collated batches of this rank.
        collect: Samples, scores and evaluates.
        guard: Checks the rollouts.

    Returns:
        By name, one value per episode of all ranks; see `evaluation_columns`.
    """
    gather: Any = run.accelerator.gather_for_metrics  # without rows that pad a batch
    parts: list[dict[str, Tensor]] = []
    for batch in batches:
        rollout = collect(Prompts.from_collated(batch, run.args.device))
        guard.check_rollout(rollout)
        parts.append(gather_columns(evaluation_columns(rollout, run.args), gather))
        run.fire("on_prediction_step")
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    warn_of_unscored(columns["scores"])
    return columns


def rows_of_samples(
    run: RunState,
    batches: Iterable[Prompts],
    respond: Callable[[Prompts], tuple[Responses, Prompts]],
    score: Callable[[Responses, Prompts], Scores],
    is_held_out: bool,
) -> list[dict[str, Any]]:
    """Respond to prompts and return the rows of a table, of all ranks.

    Args:
        run: The run.
        batches: This rank's prompts.
        respond: Samples responses; returns them with the prompts that they follow.
        score: Scores them.
        is_held_out: Whether the batches are a loader's, whose last one may be padded.
    """
    gather_for_metrics = partial(run.accelerator.gather_for_metrics, use_gather_object=True)
    gather: Callable[..., Any] = gather_for_metrics if is_held_out else gather_object
    rows: list[dict[str, Any]] = []
    for batch in batches:
        with noting_out_of_memory("generate"):
            responses, prompts = respond(batch)
        with noting_out_of_memory("score"):
            scores = score(responses, prompts)
        extra = run.logged.drain_columns()
        rows += gather(sample_rows(run.tokenizer, prompts, responses, scores, extra))
    run.timer.drain()
    run.logged.drain()
    return rows


def held_out_prompts(
    eval_dataset: object, loader_of: Callable[[Any], Iterable[Mapping[str, Any]]], device: torch.device
) -> Iterator[Prompts]:
    """Yield all held-out prompts of this rank in batches.

    Args:
        eval_dataset: The evaluation set, or a dict of them.
        loader_of: Takes a set; returns collated batches.
        device: Device of the prompts.
    """
    for dataset in eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]:
        for batch in loader_of(dataset):
            yield Prompts.from_collated(batch, device)


def training_prompts(
    run: RunState, dataset: Any, collate: Callable[[list[Any]], Mapping[str, Any]], latest: Prompts | None
) -> Iterator[Prompts]:
    """Yield one batch of training prompts: the first rows; of a stream, which has one reader, the latest.

    Args:
        run: The run.
        dataset: The training set.
        collate: Makes a batch.
        latest: The prompts of the latest update, or None.
    """
    args, total = run.args, num_rows(dataset)
    if total is not None:
        num = min(args.eval_batch_size, total // run.accelerator.num_processes)  # rows of each rank
        first = num * run.accelerator.process_index
        yield Prompts.from_collated(collate([dataset[row] for row in range(first, first + num)]), args.device)
    elif latest is not None:
        yield latest.take(range(len(latest))[: args.eval_batch_size])
