"""Data sets of the trainer: prompts in training order, and the columns that rewards read."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import datasets
import torch
from accelerate import skip_first_batches
from accelerate.utils import gather_object
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.trainer_utils import IntervalStrategy, has_length

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import NOT_OF_TRAINING, Sizes
from rlhf_ppo.data.images import ImageChats, shows_images
from rlhf_ppo.data.prompts import (
    PROMPT_COLUMNS,
    TRAINER_COLUMNS,
    ImageCollator,
    NoPrompts,
    PromptCollator,
    PromptEncoder,
    columns_of,
    may_hold_chats,
    num_rows,
    prepare_prompts,
    prompt_column,
    silent_ids,
    turn_end,
)
from rlhf_ppo.data.rollout import PositionLimit, check_lengths, collated_tensors, smallest
from rlhf_ppo.data.sources import load_named
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.generation.vllm import longest_colocated
from rlhf_ppo.models.capabilities import Vocabulary, reads_images
from rlhf_ppo.models.loading import NOT_HERE
from rlhf_ppo.models.unwrapping import replaced
from rlhf_ppo.ranks.processes import get_logger, num_processes
from rlhf_ppo.ranks.random_streams import isolated_rng
from rlhf_ppo.ranks.signals import leave_signals_to_parent
from rlhf_ppo.rewards.functions import check_not_arguments
from rlhf_ppo.rewards.reward_model import LoadedRewardModel, tokenizer_beside
from rlhf_ppo.rewards.scorer import Answer, settings_of_row
from rlhf_ppo.run.episodes import EpisodeRollouts
from rlhf_ppo.run.run_state import RunState

logger = get_logger(__name__)


HELD_OUT_SPLITS = ("test", "validation", "train")
"""The split of a data set given by name that is evaluated: the first one that it has."""


def data_order(args: PPOConfig, epoch: int = 0) -> AbstractContextManager[None]:
    """Draw the order of an epoch's prompts in the block."""
    seed = args.seed if args.data_seed is None else args.data_seed
    return isolated_rng(seed + epoch)


def num_prompts(sizes: Sizes, args: PPOConfig) -> int:
    """Return the number of distinct prompts of an update on each process."""
    return sizes.local_batch_size // args.num_generations


Counts = tuple[int, int, int, int, int, int | None, int]
"""Epochs, updates per epoch, rows, episodes of the run and of an update, updates per epoch, and those of the run."""


def counts(sizes: Sizes, loader: Any) -> Counts:
    """Return epochs, steps and samples in Trainer's form; one step is one PPO update."""
    num_updates, batch_size = sizes.num_total_batches, sizes.batch_size
    per_epoch, num_epochs, num_examples = num_updates, sys.maxsize, num_updates * batch_size
    dataset = loader.dataset
    if has_length(loader):
        per_epoch, num_examples = len(loader), len(dataset)
        num_epochs = math.ceil(num_updates / per_epoch)
    return num_epochs, per_epoch, num_examples, num_updates * batch_size, batch_size, per_epoch, num_updates


def read_by_each_rank(dataset: Any, num_rows: int, is_training: bool, args: PPOConfig) -> Any:
    """Return a data set that each rank reads by itself, to keep its own rows.

    A stream for training ends after its last full batch. A stream for evaluation becomes a list, so that no row counts
    twice.

    Args:
        dataset: Prepared prompts.
        num_rows: Prompts of a batch, of all ranks.
        is_training: Whether the prompts are for training.
        args: Gives `max_prompt_length`, for the error.

    Raises:
        ValueError: A stream for evaluation has no prompt.
    """
    if not isinstance(dataset, datasets.IterableDataset | torch.utils.data.IterableDataset):
        return dataset
    if is_training:
        return _FullBatches(dataset, num_rows, args)
    if rows := list(dataset):
        return rows
    raise ValueError(f"eval_dataset, a stream, has ended without a prompt{_of_length(args)}")


def check_ranks_alike(run: RunState, dataset: Any) -> None:
    """Check that all ranks have the same arguments and prompts, in one exchange; else they would train other weights.

    Args:
        run: The run, with its arguments.
        dataset: The prepared training set; of many rows 1,000 are compared, and none of a stream.

    Raises:
        RuntimeError: An error on this rank only ended an earlier run.
        ValueError: A rank has other arguments or prompts than rank 0.
    """
    run.check_in_step()
    if (world := run.accelerator.num_processes) == 1:
        return
    may_differ = NOT_OF_TRAINING if run.args.save_on_each_node else NOT_OF_TRAINING - {"output_dir"}
    compared = {name: str(value) for name, value in run.args.to_dict().items() if name not in may_differ}
    num = num_rows(dataset) or 0
    ids = [dataset[row]["input_ids"] for row in range(0, num, max(1, num // 1000))]
    compared["train_dataset"] = f"{num} rows, {hashlib.sha256(repr(ids).encode()).hexdigest()[:8]}"
    first, *others = gather_object([compared])
    for rank, other in zip(range(1, world), others, strict=True):
        if names := [name for name, value in first.items() if other.get(name) != value]:
            changed = ", ".join(f"{name}={other.get(name)} (rank 0: {first[name]})" for name in names)
            raise ValueError(f"rank {rank} has different arguments from rank 0: {changed}; give all ranks the same")


def leaving_signals(loader: Any) -> Any:
    """Let a prepared loader's worker processes leave signals of the run to this process."""
    inner = getattr(loader, "base_dataloader", loader)
    inner.worker_init_fn = partial(leave_signals_to_parent, inner.worker_init_fn)
    return loader


def loading(args: PPOConfig, dataset: Any, is_training: bool) -> AbstractContextManager[None]:
    """Override the arguments of a data set's loader: rollouts are full batches, and evaluations cover every row."""
    pins = args.dataloader_pin_memory and args.device.type != "cpu"  # the CPU pins no memory
    values: dict[str, Any] = {"dataloader_drop_last": is_training, "dataloader_pin_memory": pins}
    if isinstance(dataset, _FullBatches):  # which has the worker processes
        values |= {"dataloader_num_workers": 0, "dataloader_persistent_workers": False}
        unused = ("dataloader_prefetch_factor", "dataloader_multiprocessing_context")
        values |= {name: None for name in unused if hasattr(args, name)}
    return replaced(args, **values)


class _FullBatches(torch.utils.data.IterableDataset[Any]):
    """A stream up to its last full batch of all ranks, so that the ranks end a pass together.

    The stream's worker processes read rows only: each has a part of the stream, whose end does not end the pass.

    Args:
        stream: Prepared prompts.
        num_rows: Prompts of a batch, of all ranks.
        args: Gives the number and the settings of the worker processes.
    """

    def __init__(self, stream: Any, num_rows: int, args: PPOConfig) -> None:
        self.stream, self.num_rows = stream, num_rows
        names = ("num_workers", "prefetch_factor", "multiprocessing_context", "in_order")  # older versions lack some
        names = [name for name in names if hasattr(args, f"dataloader_{name}")]
        self.settings: Any = {name: getattr(args, f"dataloader_{name}") for name in names}

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self.stream)
        if self.settings["num_workers"] > 0:
            loader: Any = DataLoader(self.stream, self.num_rows, collate_fn=list, **self.settings)
            rows = itertools.chain.from_iterable(leaving_signals(loader))
        while len(batch := list(itertools.islice(rows, self.num_rows))) == self.num_rows:
            yield from batch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the stream, which may shuffle by it."""
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)


def _of_length(args: PPOConfig) -> str:
    return "" if args.max_prompt_length is None else f" of at most max_prompt_length={args.max_prompt_length} tokens"


def batches_of_pass(loader: Any, args: PPOConfig, sizes: Sizes, epoch: int, num_skipped: int) -> Iterator[Any]:
    """Yield the full batches of a pass over the prompts, after the first `num_skipped`, which an earlier run has used.

    Args:
        loader: The prepared loader.
        args: The arguments.
        sizes: Sizes of the run.
        epoch: Number of the pass.
        num_skipped: Batches that are left out.
    """
    expected = num_prompts(sizes, args)
    if num_skipped > 0:
        loader = skip_first_batches(loader, num_skipped)
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    batches = iter(loader)
    with data_order(args, epoch):  # samplers without a generator draw at their start
        first = list(itertools.islice(batches, 1))
    if not first and (epoch, num_skipped) == (0, 0):
        raise ValueError(
            f"train_dataset, a stream, has ended without the prompts of one update, {expected} for each process"
            f"{_of_length(args)}"
        )
    for batch in itertools.chain(first, batches):
        if (num := len(collated_tensors(batch)[0])) != expected:
            raise ValueError(
                f"data_collator returned {num} prompts of train_dataset, not the {expected} of an update; it must "
                "return one for each row"
            )
        yield batch


def prompt_lengths(dataset: Any) -> list[int]:
    """Return the tokens of each prompt in a result of `prepare_prompts`, not a stream."""
    rows: Any = dataset.select_columns("input_ids") if isinstance(dataset, datasets.Dataset) else dataset
    return [len(row["input_ids"]) for row in rows]


def check_rows(dataset: Any, name: str, needs_prompts: bool = True) -> None:
    """Check the type of a data set and its first row; streams are not read.

    Args:
        dataset: The user's data set.
        name: Its name in errors.
        needs_prompts: Whether a column of a `datasets.Dataset` holds prompts.

    Raises:
        ValueError: It is no data set, has no rows, its first row is not a dict, or a `datasets.Dataset` has no column
            with prompts.
    """
    if isinstance(dataset, datasets.IterableDataset | torch.utils.data.IterableDataset):
        return
    columns = columns_of(dataset, name)
    if needs_prompts and isinstance(dataset, datasets.Dataset):
        prompt_column(columns, name)


def check_datasets(args: PPOConfig, train_dataset: Any, eval_dataset: Any, needs_prompts: bool = True) -> None:
    """Check the types of the data sets, their first rows, that evaluation has prompts, and the metric to follow.

    Args:
        args: The arguments.
        train_dataset: The training set.
        eval_dataset: The evaluation set, several by name, or None.
        needs_prompts: Whether a column holds prompts; environments need none.

    Raises:
        ValueError: A value is not a data set, its rows are not dicts, prompts are missing, or `metric_for_best_model`
            names none of several evaluation sets.
    """
    if train_dataset is None:
        raise ValueError("train_dataset=None: pass the prompts to train on")
    if isinstance(train_dataset, NoPrompts) and args.num_generations > 1:
        raise ValueError(
            f"num_generations={args.num_generations} repeats the prompts of train_dataset, but there is none; leave "
            "it 1, and pass a query to step() once per response"
        )
    check_rows(train_dataset, "train_dataset", needs_prompts)
    if eval_dataset is None:
        evaluating = {
            f"eval_strategy={IntervalStrategy(args.eval_strategy).value!r}": args.eval_strategy != "no",
            "eval_on_start=True": args.eval_on_start,
        }
        if option := next((option for option, is_set in evaluating.items() if is_set), None):
            raise ValueError(f"{option} evaluates, but eval_dataset=None: pass the prompts to evaluate on")
    else:
        check_held_out(eval_dataset, needs_prompts)
        if isinstance(eval_dataset, Mapping) and args.compares_models():
            _check_metric(args, list(eval_dataset))


def _check_metric(args: PPOConfig, names: Sequence[str]) -> None:
    """Check that `metric_for_best_model` is a figure of one of several evaluation sets."""
    metric = str(args.metric_for_best_model)
    if not metric.removeprefix("eval_").startswith(tuple(f"{name}_" for name in names)):
        raise ValueError(
            f"metric_for_best_model={metric!r} names none of the data sets of eval_dataset, {names}: set it to a "
            f"figure of one of them, such as '{names[0]}_score'"
        )


def check_held_out(eval_dataset: Any, needs_prompts: bool) -> None:
    """Check the type and the first row of an evaluation set, or of several by name; see `check_datasets`."""
    if isinstance(eval_dataset, Mapping):
        for name, dataset in eval_dataset.items():
            check_rows(dataset, f"eval_dataset[{name!r}]", needs_prompts)
    else:
        check_rows(eval_dataset, "eval_dataset", needs_prompts)


def load_data(
    args: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    train_dataset: Any,
    eval_dataset: Any,
    episodes: EpisodeRollouts | None,
) -> tuple[Any, Any]:
    """Load data sets given by name, and check them; environments may make the prompts.

    Raises:
        ValueError: A value cannot be loaded, is not a data set, its rows are not dicts, or prompts are missing.
    """
    train_dataset = load_named(train_dataset, "train_dataset", ("train",))
    eval_dataset = load_named(eval_dataset, "eval_dataset", HELD_OUT_SPLITS)
    if episodes is not None:
        train_dataset = episodes.prepare(tokenizer, train_dataset)
    check_datasets(args, train_dataset, eval_dataset, needs_prompts=episodes is None)
    return train_dataset, eval_dataset


def policy_tokenizer(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None, model: object
) -> PreTrainedTokenizerBase:
    """Return the user's tokenizer or that of a processor, or load it from the policy's directory or hub name.

    Args:
        processing_class: A tokenizer, a processor, or None.
        model: The policy, as the trainer takes it.

    Raises:
        ValueError: The policy has no name, or no tokenizer is saved with it.
    """
    if isinstance(processing_class, ProcessorMixin):
        processor: Any = processing_class
        return processor.tokenizer
    if processing_class is not None:
        return processing_class
    is_name = isinstance(model, str | os.PathLike)
    path = model if is_name else getattr(getattr(model, "config", None), "_name_or_path", "")
    tokenizer = tokenizer_beside(path) if path else None
    if tokenizer is not None:
        return tokenizer
    reason = "has none" if os.path.isdir(path) else NOT_HERE
    missing = f"={os.fspath(path)!r} {reason}" if path else f" is a {type(model).__name__} without one"
    raise ValueError(
        "processing_class=None loads the tokenizer from the model's directory or hub name, but model"
        f"{missing}; save it there with tokenizer.save_pretrained, or pass "
        "processing_class=AutoTokenizer.from_pretrained(...)"
    )


def image_chats(
    args: PPOConfig,
    processor: Any,
    readers: Mapping[str, nn.Module],
    rewards: Sequence[LoadedRewardModel],
    *,
    is_episodic: bool,
    prompt_sets: Iterable[Any],
) -> ImageChats | None:
    """Return the encoding of conversations with images, if a data set has images.

    Args:
        args: The arguments.
        processor: The policy's processor, or None.
        readers: The models that read prompts, by their arguments.
        rewards: The reward models.
        is_episodic: Whether rollouts have several turns.
        prompt_sets: The data sets.

    Raises:
        ValueError: An argument excludes images, or a model does not read them.
    """
    if not any(shows_images(dataset, processor is not None and not is_episodic) for dataset in prompt_sets):
        return None
    blind = [argument for argument, model in readers.items() if not reads_images(model)]
    problem = None
    if is_episodic:
        problem = "tools, environments and rollout_func read texts only: leave them out"
    elif args.generation_engine == "continuous":
        problem = "generation_engine='continuous' reads texts only: set it to 'transformers' or 'vllm'"
    elif blind:
        problem = f"{blind[0]} is a {type(readers[blind[0]]).__name__} without vision: pass a model of images and text"
    elif processor is None:
        problem = (
            "there is no processor: pass processing_class=AutoProcessor.from_pretrained(...), whose error names a "
            "missing package"
        )
    elif any(reward.tokenizer is not None and reward.processor is None for reward in rewards):
        problem = "a reward model has its own tokens: pass its processor as reward_processing_classes"
    if problem is not None:
        raise ValueError(f"a data set has images, but {problem}")
    return ImageChats.of(processor, num_processes(args))


@dataclass(frozen=True)
class PromptPreparation:
    """Tokenization and checks of data sets.

    Attributes:
        tokenizer: The policy's tokenizer.
        args: Gives `max_prompt_length`, `dataset_num_proc` and `response_length`.
        vocabulary: Ids that all models embed.
        limit: Longest sequence that the models, and a started engine, support; None without a limit.
        columns_are_read: Whether a reward or an environment gets all columns; else only those of prompts are kept.
        chats: Encodes conversations with images; None in a run without images.
        encoder: Makes the tokenization of a data set of that name; None: prompts only.
        stops: The stop tokens.
        rewards: The reward models, whose templates and tokens may take more positions.
    """

    tokenizer: PreTrainedTokenizerBase
    args: PPOConfig
    vocabulary: Vocabulary
    limit: PositionLimit | None
    columns_are_read: bool = True
    encoder: Callable[[str, Vocabulary, Sequence[int]], PromptEncoder] | None = None
    stops: Sequence[int] = ()
    chats: ImageChats | None = None
    rewards: Sequence[LoadedRewardModel] = ()

    def held_out(self, eval_dataset: Any, *own: Any) -> Any:
        """Load, check and tokenize held-out prompts that a call passes; see `prepared`. Names of own sets pass."""
        names = {name for sets in own if isinstance(sets, Mapping) for name in sets}
        if isinstance(eval_dataset, str) and eval_dataset in names:
            return eval_dataset
        eval_dataset = load_named(eval_dataset, "eval_dataset", HELD_OUT_SPLITS)
        check_held_out(eval_dataset, needs_prompts=self.encoder is None)
        return self.prepared(eval_dataset, "eval_dataset", *own)

    def of_test(self, test_dataset: Any, *own: Any) -> Any:
        """Load, check and tokenize the prompts of `predict`; see `prepared`."""
        test_dataset = load_named(test_dataset, "test_dataset", HELD_OUT_SPLITS)
        check_rows(test_dataset, "test_dataset", needs_prompts=False)
        return self.prepared(test_dataset, "test_dataset", *own)

    def prepared(self, dataset: Any, name: str, *own: Any) -> Any:
        """Tokenize and check a data set, or each of a dict of data sets.

        Args:
            dataset: The user's data set.
            name: Its name in errors.
            *own: The trainer's data sets, or dicts of them; they are prepared and stay as they are.

        Returns:
            Rows with `input_ids`.

        Raises:
            ValueError: A row is invalid, or prompt and response exceed the positions. Rows of streams are checked when
                read.
        """
        if isinstance(dataset, Mapping):
            return {key: self.prepared(value, f"{name}[{key!r}]", *own) for key, value in dataset.items()}
        if any(dataset is one for sets in own for one in (sets.values() if isinstance(sets, Mapping) else [sets])):
            return dataset
        args = self.args
        if self.columns_are_read and num_rows(dataset):
            check_not_arguments(columns_of(dataset, name), name)
        if isinstance(dataset, Dataset) and args.remove_unused_columns and not self.columns_are_read:
            used = {*PROMPT_COLUMNS, *TRAINER_COLUMNS, args.length_column_name}
            prompt_column(dataset.column_names, name)
            dataset = dataset.select_columns([column for column in dataset.column_names if column in used])
        rows: Any = prepare_prompts(dataset, self._encode(name), args.max_prompt_length, args.dataset_num_proc)
        self._check_lengths(rows)
        if (row := self._begins_twice(rows)) is not None:
            logger.warning(
                f"{name}: the prompt of row {row} begins with BOS twice, because the tokenizer adds BOS to a text "
                "that holds it; leave BOS out of the texts, or pass conversations, to which the chat template adds "
                "it"
            )
        if self.encoder is None and num_rows(rows) is not None and may_hold_chats(rows):
            self._warn_of_turn_end()
        return rows

    def _encode(self, name: str) -> PromptEncoder:
        if self.encoder is not None:
            return self.encoder(name, self.vocabulary, self.stops)
        vocabulary, settings = self.vocabulary, self.args.template_kwargs
        return PromptEncoder(self.tokenizer, name, vocabulary.size, vocabulary.limited_by, settings, self.chats)

    def collator(self, user_collator: Callable[[Any], Any] | None, pad_token_id: int) -> Callable[[Any], Any]:
        """Return the user's collator or that of the package, with the images of a run that has some."""
        collate = user_collator or PromptCollator(pad_token_id)
        return collate if self.chats is None else ImageCollator(collate, self._encode("a data set"))

    def _begins_twice(self, rows: Any) -> int | None:
        """Return the first row that begins with BOS twice, or None."""
        bos = self.tokenizer.bos_token_id
        encoded: Any = self.tokenizer("a")
        if bos is None or num_rows(rows) is None or encoded["input_ids"][:1] != [bos]:
            return None
        rows = rows.select_columns("input_ids") if isinstance(rows, Dataset) else rows
        return next((index for index, row in enumerate(rows) if list(row["input_ids"][:2]) == [bos, bos]), None)

    def _warn_of_turn_end(self) -> None:
        """Warn if the chat template ends answers with a token other than the stop token: Gemma's is not its EOS."""
        args, tokenizer = self.args, self.tokenizer
        if not self.stops or args.stop_strings:
            return
        end, stop = turn_end(tokenizer, args.template_kwargs), self.stops[0]
        if end is not None and end not in self.stops:
            ends, stops = tokenizer.convert_ids_to_tokens([end, stop])
            logger.warning_once(
                f"The chat template ends an answer with {ends!r} ({end}), but responses end only at {stops!r} "
                f"({stop}). If the policy was trained with this template, set stop_token_id={end} instead."
            )

    @property
    def never_sampled(self) -> list[int] | None:
        """The ids that sampling leaves out: those that a model cannot embed and, as in TRL, the token of images."""
        ids = list(self.vocabulary.never_sampled or ())
        if self.chats is not None and self.vocabulary.image_token is not None:
            ids.append(self.vocabulary.image_token)
        return ids or None

    @property
    def longest_sequence(self) -> PositionLimit | None:
        """Longest sequence that the models and the engine support, as far as known."""
        in_engine = longest_colocated(self.args) if self.args.generation_engine == "vllm" else None
        return smallest((self.limit, in_engine))

    def within(self, engine: GenerationEngine, *datasets: Any) -> PromptPreparation:
        """Return the preparation for a started engine.

        Args:
            engine: It may have its own limit as `longest_sequence`.
            *datasets: Prepared data sets; None and dicts are allowed.

        Raises:
            ValueError: A prompt and its response exceed the engine's limit.
        """
        preparation = replace(self, limit=smallest((self.limit, getattr(engine, "longest_sequence", None))))
        if preparation.longest_sequence != self.longest_sequence:
            for dataset in datasets:
                for rows in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
                    preparation._check_lengths(rows)
        return preparation

    def _check_lengths(self, rows: Any) -> None:
        if rows is None or num_rows(rows) is None:
            return
        lengths, response_length = prompt_lengths(rows), self.args.response_length
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        limits = [self._limit_of(reward, rows, lengths, longest) for reward in self.rewards]
        check_lengths(lengths[longest], response_length, smallest((self.longest_sequence, *limits)))

    def _limit_of(
        self, reward: LoadedRewardModel, rows: Any, lengths: Sequence[int], longest: int
    ) -> PositionLimit | None:
        """Return the longest prompt and response for a reward model, which its template or own tokens may shorten."""
        chats = self.chats and self.chats.of_model(reward.processor, num_processes(self.args))
        silent = silent_ids(self.tokenizer, self.stops)
        stop_is_silent = not self.args.stop_strings and silent.issuperset(self.stops)

        def limit(row: Mapping[str, Any]) -> PositionLimit | None:
            shown = self._encode("a data set").with_images(row) if self.chats else None
            prompt = row.get("prompt") if shown is None else shown[1]
            settings = settings_of_row({**row, "prompt": prompt}, self.args.template_kwargs)
            answer = Answer(
                prompt, "", True, row["input_ids"], tokenizer=self.tokenizer, silent=silent, settings=settings
            )
            return reward.limit(answer, chats, stop_is_silent)

        of_longest = limit(rows[longest])
        if of_longest is None or reward.tokenizer is None:
            return of_longest
        shortest = min(length for row, length in zip(rows, lengths, strict=True) if limit(row) is not None)
        return of_longest._replace(tokens=shortest - 1 + self.args.response_length)
