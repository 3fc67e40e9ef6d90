"""Checks of all files and models that options name, before anything is trained; all problems are found at once."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from datasets import Dataset
from torch import nn
from transformers.trainer_utils import has_length
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.checkpoints.run import check_start
from rlhf_ppo.cli.arguments import DryRunScriptArguments, PPOArgumentParser, PPOScriptArguments, check_columns
from rlhf_ppo.cli.errors import USER_ERRORS, Problems
from rlhf_ppo.cli.judge import check_judge, check_responses, load_rows
from rlhf_ppo.cli.options import JudgeArguments
from rlhf_ppo.cli.training import (
    check_model,
    has_reward_model,
    load_tokenizer,
    resumed_checkpoint,
    text_columns,
)
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import output_directory
from rlhf_ppo.data.prompts import PromptEncoder, is_conversation, prompt_column
from rlhf_ppo.data.sources import choose_split, hold_out, load_splits, separate_prompts
from rlhf_ppo.models.adapters import is_adapter_directory
from rlhf_ppo.models.capabilities import position_limit, vocabulary_of
from rlhf_ppo.training.checks import check_writable
from rlhf_ppo.training.datasets import PromptPreparation

Origins = Mapping[str, str | None]
"""For each directory that an earlier step of a pipeline writes: the model that the step starts from, if any."""

MANY_ROWS = 20_000
"""Rows above which only the first row is tokenized here; the run reads the others."""

_UNKNOWN_OPTIONS = re.compile(r"(?:option |, )(--[\w-]+)")
_OPTION_OF_ERROR = re.compile(r"^(?:\w+: )?(?:argument )?([\w/-]+)(?=[:=])")


# ---- Options ----


def parse(groups: Any, program: str, argv: Sequence[str] | None, problems: Problems) -> Any:
    """Parse a command line; wrong options are collected and left out, and the others are parsed again.

    Args:
        groups: The dataclasses whose fields are the options, or one of them.
        program: Start of error messages.
        argv: The options; None takes the program's own.
        problems: Gets a message for each wrong option.

    Raises:
        SystemExit: The remaining options cannot be parsed.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    parser: Any = PPOArgumentParser(groups, prog=program)
    parser.raises_errors = True
    while True:
        known = len(problems.messages)
        with problems.collecting():
            return parser.parse_args_and_config(words)
        remaining = _without_options(words, problems.messages[-1])
        if len(problems.messages) == known or remaining == words:
            problems.fail(program)
        words = remaining


def _without_options(words: Sequence[str], message: str) -> list[str]:
    """Return a command line without the options at the start of an error message."""
    names = _UNKNOWN_OPTIONS.findall(message) if "there is no option" in message else _OPTION_OF_ERROR.findall(message)
    wrong = {name.lstrip("-").replace("-", "_") for each in names for name in each.split("/")}
    kept, keeps = [], True
    for word in words:
        if word.startswith("--"):
            keeps = word.partition("=")[0].lstrip("-").replace("-", "_").removeprefix("no_") not in wrong
        kept += [word] if keeps else []
    return kept


# ---- The commands ----


def check_step_options(
    problems: Problems, command: str, options: Any, *, origins: Origins = MappingProxyType({})
) -> tuple[Any, Any]:
    """Check all data, models and rewards that the options of a command name; no weights are loaded.

    Args:
        problems: Gets the problems.
        command: "train", "sft", "reward" or "judge".
        options: The parsed options: `JudgeArguments`, or the three groups of a training command.
        origins: Directories that an earlier step of a pipeline writes.

    Returns:
        The rows to train on and to evaluate on, if they could be loaded.
    """
    if command == "judge":
        _check_judge(problems, options, origins)
        return None, None
    script_args, args, model_args = options
    if (args.output_dir or "") not in origins:
        with problems.collecting():
            if command == "train":
                check_start(output_directory(args), args.resume_from_checkpoint, args.overwrite_output_dir)
            else:
                resumed_checkpoint(args)
    if command == "train":
        return _check_ppo(problems, script_args, args, model_args, origins)
    return _check_trl(problems, command, script_args, args, model_args, origins)


def _model_at(problems: Problems, path: str, argument: str, origins: Origins, trusts: bool) -> str | None:
    """Return the existing model that a path is, or will be trained from; None if there is none.

    A model that is missing is a problem, except that of an earlier step, which has reported it.
    """
    base: str | None = path
    while base is not None and base in origins:
        base = origins[base]
    if base is not None:
        with problems.collecting() if base == path else contextlib.suppress(*USER_ERRORS):
            check_model(base, argument, trusts)
            return base
    return None


def _tokenizer_at(problems: Problems, base: str | None, argument: str, trusts: bool) -> Any:
    if base is not None:
        with problems.collecting():
            return load_tokenizer(base, trusts, argument)
    return None


def _check_ppo(
    problems: Problems, script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig, origins: Origins
) -> tuple[Any, Any]:
    trusts = script_args.trust_remote_code
    base = _model_at(problems, args.sft_model_path, "sft_model_path", origins, trusts)
    named = model_args.model_name_or_path
    tokenizer = _tokenizer_at(problems, named or base, "model_name_or_path" if named else "sft_model_path", trusts)
    if has_reward_model(script_args, args):
        _model_at(problems, args.reward_model_path, "reward_model_path", origins, trusts)
    if script_args.value_model_path is not None:
        _model_at(problems, script_args.value_model_path, "value_model_path", origins, trusts)
    rows = (None, None)
    with problems.collecting():
        rows = train_and_eval_rows(script_args, always_evaluates=True)
        for name, dataset in zip(("train_dataset", "eval_dataset"), rows, strict=True):
            if dataset is not None and not script_args.environment:
                _check_prompts(dataset, name, args, tokenizer, None)
        if rows[0] is not None and has_length(rows[0]):
            args.count_sizes(1, len(rows[0]))  # more processes need more prompts
    if script_args.ptx_dataset is not None:
        with problems.collecting():
            texts = load_splits(script_args.ptx_dataset, argument="ptx_dataset")
            choose_split(texts, "train", "the split of ptx_dataset")
    return rows


def _check_prompts(dataset: Any, name: str, args: PPOConfig, tokenizer: Any, policy: nn.Module | None) -> None:
    """Tokenize prompts as the run does; of streams and of many rows, only the first."""
    first = first_row(dataset)
    if first is None:
        return
    prompt_column(first, name)
    if tokenizer is None:
        return
    if policy is not None and has_length(dataset) and len(dataset) <= MANY_ROWS:
        limits = vocabulary_of(policy), position_limit(policy)
        PromptPreparation(tokenizer, args, *limits).prepared(dataset, name)
    else:
        PromptEncoder(tokenizer, name, None).row(first, 0)


def train_and_eval_rows(script_args: DryRunScriptArguments, always_evaluates: bool = False) -> tuple[Any, Any]:
    """Load the rows to train on and to evaluate on.

    Args:
        script_args: Gives the data and its splits.
        always_evaluates: Whether to hold rows out for evaluation if there is no split for it.
    """
    splits = load_splits(script_args.dataset_name, script_args.dataset_config, script_args.dataset_streaming)
    train_dataset = choose_split(splits, script_args.dataset_train_split, "dataset_train_split")
    if script_args.dataset_test_split != "test" or "test" in splits:
        rows = train_dataset, choose_split(splits, script_args.dataset_test_split, "dataset_test_split")
    else:
        rows = hold_out(train_dataset, num_rows=100) if always_evaluates else (train_dataset, None)
    if always_evaluates:  # prompts for PPO
        rows = _with_prompts(rows, where_missing=True)
    return rows


def _with_prompts(rows: tuple[Any, Any], where_missing: bool = False) -> tuple[Any, Any]:
    """Return data sets of preference pairs with explicit prompts; see `separate_prompts`."""
    train_dataset, eval_dataset = rows
    held_out = None if eval_dataset is None else separate_prompts(eval_dataset, where_missing)
    return separate_prompts(train_dataset, where_missing), held_out


def first_row(dataset: Any) -> Mapping[str, Any] | None:
    """Return the first row of a dataset or a stream; None if it has no rows."""
    return next(iter(dataset.take(1)), None)


def _check_trl(
    problems: Problems,
    command: str,
    script_args: DryRunScriptArguments,
    args: Any,
    model_args: ModelConfig,
    origins: Origins,
) -> tuple[Any, Any]:
    path, trusts, tokenizer = model_args.model_name_or_path, args.trust_remote_code, None
    if path is None:
        problems.add("model_name_or_path=None: give the directory or hub name of the model to train")
    else:
        base = _model_at(problems, path, "model_name_or_path", origins, trusts)
        tokenizer = _tokenizer_at(problems, base, "model_name_or_path", trusts)
        if base is not None and is_adapter_directory(base):
            problems.add(
                f"model_name_or_path={path!r} is an adapter, and {command} needs a whole model: merge it into "
                "its base with PEFT's merge_and_unload(), save that with the tokenizer in another directory, and give "
                "the directory"
            )
    rows = (None, None)
    with problems.collecting():
        rows = train_and_eval_rows(script_args)
        if command == "reward":
            rows = _with_prompts(rows)
        alternatives = text_columns(command, args)
        for dataset in rows:
            if dataset is not None:
                check_columns(dataset, alternatives)
                _check_texts(script_args.dataset_name, dataset, alternatives, tokenizer)
    return rows


def _check_texts(name: str | None, dataset: Any, alternatives: Sequence[set[str]], tokenizer: Any) -> None:
    """Check that the columns hold texts or messages in the first row, and no row lacks them."""
    first = first_row(dataset) or {}
    columns = next((needed for needed in alternatives if needed <= first.keys()), set()) - {"input_ids"}
    for column in sorted(columns):
        value, place = first[column], f"dataset_name={name!r}: the column `{column}`"
        if not isinstance(value, str) and not is_conversation(value):
            raise ValueError(
                f"{place} of row 0 holds {value!r:.60} ({type(value).__name__}); make it a text or a list of messages"
            )
        if is_conversation(value) and tokenizer is not None and tokenizer.chat_template is None:
            raise ValueError(
                f"{place} holds conversations, and the model's tokenizer has no chat template; choose a chat model, "
                "or give texts"
            )
        if isinstance(dataset, Dataset) and (row := first_null(dataset, column)) is not None:
            raise ValueError(f"{place} of row {row} holds nothing; leave the row out, or fill it in")


def first_null(dataset: Dataset, column: str) -> int | None:
    """Return the first row with nothing in a column, or None."""
    values: Any = dataset.with_format("arrow")[column][:]
    return int(np.argmax(values.is_null())) if values.null_count else None


def _check_judge(problems: Problems, args: JudgeArguments, origins: Origins) -> None:
    with problems.collecting():
        check_judge(args)
    with problems.collecting():
        check_writable(args.output_dir, "output_dir")
    trusts, tokenizers = args.trust_remote_code, []
    for argument in ("model", "opponent", *(() if args.asks_chat_model else ("judge_model",))):
        if (path := getattr(args, argument)) is not None:
            base = _model_at(problems, path, argument, origins, trusts)
            if argument != "judge_model":
                tokenizers.append(_tokenizer_at(problems, base, argument, trusts))
    with problems.collecting():
        rows = load_rows(args)
        check_responses(args, rows)
        for tokenizer in filter(None, tokenizers):
            PromptEncoder(tokenizer, f"dataset_name={args.dataset_name!r}", None).row(rows[0], 0)
