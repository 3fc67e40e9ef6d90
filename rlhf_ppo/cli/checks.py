"""Checks of all files and models that options name, before anything is trained; all problems are found at once."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.trainer_utils import has_length
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.checkpoints.run import check_start
from rlhf_ppo.cli.arguments import DryRunScriptArguments, PPOScriptArguments, check_columns
from rlhf_ppo.cli.errors import Problems
from rlhf_ppo.cli.judge import check_judge, check_responses, load_rows
from rlhf_ppo.cli.options import JudgeArguments
from rlhf_ppo.cli.training import (
    check_model,
    has_reward_model,
    load_tokenizer,
    policy_tokenizer,
    resumed_checkpoint,
    text_columns,
)
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import output_directory
from rlhf_ppo.data.preferences import separate_prompts
from rlhf_ppo.data.prompts import PromptEncoder, is_conversation, prompt_column
from rlhf_ppo.data.sources import choose_split, hold_out, load_splits
from rlhf_ppo.rewards.resolve import check_reward_name, environment_name

__all__ = ["Problems", "check_step_options", "parse", "train_and_eval_rows"]

IsComing = Callable[[str], bool]
"""Whether an earlier step of a pipeline writes a path, which does not exist yet."""


def _exists(path: str) -> bool:
    return False


# ---- Options ----


def parse(parser: Any, argv: Sequence[str] | None, problems: Problems) -> Any:
    """Parse a command line; wrong options are collected and left out, and the others are parsed again.

    Args:
        parser: A `PPOArgumentParser`.
        argv: The options; None takes the program's own.
        problems: Gets a message for each wrong option.

    Raises:
        SystemExit: The remaining options cannot be parsed.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    parser.exit_on_error = False
    while True:
        known = len(problems.messages)
        with problems.collecting():
            try:
                return parser.parse_args_and_config(words)
            except argparse.ArgumentError as error:
                raise ValueError(str(error)) from error
        remaining = _without_options(words, problems.messages[-1])
        if len(problems.messages) == known or remaining == words:
            problems.fail(parser.prog)
        words = remaining


def _without_options(words: Sequence[str], message: str) -> list[str]:
    """Return a command line without the options at the start of an error message."""
    start = re.match(r"(?:\w+: )?(?:there is no option ([\w, -]+?)(?:;|$)|argument ([\w/-]+):|(\w+)=)", message)
    names = re.split(r", |/", next(filter(None, start.groups()))) if start else []
    wrong = {name.lstrip("-").replace("-", "_") for name in names}
    kept, keeps = [], True
    for word in words:
        if word.startswith("--"):
            keeps = word.partition("=")[0].lstrip("-").replace("-", "_").removeprefix("no_") not in wrong
        kept += [word] if keeps else []
    return kept


# ---- The commands ----


def check_step_options(
    problems: Problems, command: str, options: Any, *, coming: IsComing = _exists
) -> tuple[Any, Any]:
    """Check all data, models and rewards that the options of a command name; no weights are loaded.

    Args:
        problems: Gets the problems.
        command: "train", "sft", "reward" or "judge".
        options: The parsed options: `JudgeArguments`, or the three groups of a training command.
        coming: Tells which paths an earlier step of a pipeline writes.

    Returns:
        The rows to train on and to evaluate on, if they could be loaded.
    """
    if command == "judge":
        _check_judge(problems, options, coming)
        return None, None
    script_args, args, model_args = options
    if not coming(args.output_dir or ""):
        with problems.collecting():
            if command == "train":
                check_start(output_directory(args), args.resume_from_checkpoint, args.overwrite_output_dir)
            else:
                resumed_checkpoint(args)
    if command == "train":
        return _check_ppo(problems, script_args, args, model_args, coming)
    return _check_trl(problems, command, script_args, args, model_args, coming)


def _check_ppo(
    problems: Problems, script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig, coming: IsComing
) -> tuple[Any, Any]:
    trusts, tokenizer = script_args.trust_remote_code, None
    if not coming(args.sft_model_path):
        with problems.collecting():
            check_model(args.sft_model_path, "sft_model_path", trusts)
            tokenizer = policy_tokenizer(script_args, args, model_args)
    if has_reward_model(script_args, args) and not coming(args.reward_model_path):
        with problems.collecting():
            check_model(args.reward_model_path, "reward_model_path", trusts)
    for name in script_args.reward_funcs or ():
        with problems.collecting():
            check_reward_name(name)
    _check_agents(problems, script_args)
    rows = (None, None)
    with problems.collecting():
        rows = train_and_eval_rows(script_args, always_evaluates=True)
        for name, dataset in zip(("train_dataset", "eval_dataset"), rows, strict=True):
            if dataset is not None and (first := first_row(dataset)) is not None:
                _check_prompt(script_args, tokenizer, name, first)
        if rows[0] is not None and has_length(rows[0]):
            args.count_sizes(1, len(rows[0]))  # more processes need more prompts
    if script_args.ptx_dataset is not None:
        with problems.collecting():
            texts = load_splits(script_args.ptx_dataset, argument="ptx_dataset")
            choose_split(texts, "train", "the split of ptx_dataset")
    return rows


def _check_agents(problems: Problems, script_args: PPOScriptArguments) -> None:
    """Check that the files of tools and environments are there."""
    named = [("tools", name) for name in script_args.tools or ()]
    named += [("environment", environment_name(name)[1]) for name in script_args.environment or ()]
    for argument, name in named:
        with problems.collecting():
            check_reward_name(name, argument)


def _check_prompt(script_args: PPOScriptArguments, tokenizer: Any, name: str, first: Any) -> None:
    """Check the first row of a data set, unless an environment makes the prompts."""
    if script_args.environment:
        return
    prompt_column(first, name)
    if tokenizer is not None:
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
    coming: IsComing,
) -> tuple[Any, Any]:
    path = model_args.model_name_or_path
    if path is None or not coming(path):
        with problems.collecting():
            if path is None:
                raise ValueError("model_name_or_path=None: give the directory or hub name of the model to train")
            check_model(path, "model_name_or_path", args.trust_remote_code)
            load_tokenizer(path, args.trust_remote_code, "model_name_or_path")
    rows = (None, None)
    with problems.collecting():
        rows = train_and_eval_rows(script_args)
        if command == "reward":
            rows = _with_prompts(rows)
        alternatives = text_columns(command, args)
        for dataset in rows:
            if dataset is not None:
                check_columns(dataset, alternatives)
                _check_first_texts(script_args.dataset_name, dataset, alternatives)
    return rows


def _check_first_texts(name: str | None, dataset: Any, alternatives: Sequence[set[str]]) -> None:
    """Check that the columns of the first row hold texts or messages."""
    first = first_row(dataset) or {}
    columns = next((needed for needed in alternatives if needed <= first.keys()), set()) - {"input_ids"}
    for column in sorted(columns):
        value = first[column]
        if not isinstance(value, str) and not is_conversation(value):
            raise ValueError(
                f"dataset_name={name!r}: the column `{column}` of row 0 holds {value!r:.60} ({type(value).__name__}); "
                "make it a text or a list of messages"
            )


def _check_judge(problems: Problems, args: JudgeArguments, coming: IsComing) -> None:
    with problems.collecting():
        check_judge(args)
    paths = {name: getattr(args, name) for name in ("model", "opponent")}
    if not args.asks_chat_model:
        paths["judge_model"] = args.judge_model
    for argument, path in paths.items():
        if path is not None and not coming(path):
            with problems.collecting():
                check_model(path, argument, args.trust_remote_code)
                if argument != "judge_model":
                    load_tokenizer(path, args.trust_remote_code, argument)
    with problems.collecting():
        check_responses(args, load_rows(args))
