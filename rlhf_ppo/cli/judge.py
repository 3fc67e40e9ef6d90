"""`rlhf-ppo judge`: the share of prompts for which a judge prefers one model's response."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_ppo.checkpoints.files import write_json
from rlhf_ppo.cli.arguments import check_single_process, parse
from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.options import JudgeArguments
from rlhf_ppo.cli.training import load_tokenizer, template_kwargs
from rlhf_ppo.data.prompts import is_conversation
from rlhf_ppo.data.sources import choose_split, load_splits, separate_prompts
from rlhf_ppo.evaluation.win_rate import Answering, WinRate, given_answers, respond
from rlhf_ppo.models.loading import load_pretrained
from rlhf_ppo.reporting.evaluation import print_table
from rlhf_ppo.reporting.judgements import JUDGED, Judgement, keep, read_win_rate, win_rate_beside
from rlhf_ppo.reporting.model_card import show_judgements
from rlhf_ppo.reporting.verdict import Verdict, recorded_runs, verdict_of
from rlhf_ppo.rewards.functions import finished
from rlhf_ppo.rewards.judges import (
    OPENAI_URL,
    OPTIONS,
    QUESTION,
    ChatJudge,
    Compared,
    PreferenceReward,
    RewardModelJudge,
    ScoringJudge,
    as_judge,
)
from rlhf_ppo.rewards.resolve import resolve_reward
from rlhf_ppo.rewards.reward_model import Answer
from rlhf_ppo.terminal import print_text, redacted


def judge(argv: Sequence[str] | None = None, prog: str = "rlhf-ppo judge") -> WinRate | None:
    """Compare the responses of two models, or of a model and the data set, and print the model's win rate.

    Args:
        argv: The options of `JudgeArguments`. None takes the program's own.
        prog: Start of error messages.

    Returns:
        The verdicts.

    Raises:
        SystemExit: An option, the data, a model or the judge is wrong; the message names it.
    """
    (args,) = parse(JudgeArguments, prog, argv)
    with user_errors(prog):
        check_single_process("responses are judged")
        check_judge(args)
        if not args.dry_run:
            return judge_responses(args)
        make_judge(args)
    print_text(f"Dry run: no problems found; the verdicts would be in {args.output_dir}.")
    return None


def judge_responses(args: JudgeArguments) -> WinRate:
    """Generate missing responses, ask the judge, and print and save the verdicts.

    Raises:
        ConnectionError: The server of a judge does not answer.
        OSError, ValueError: The data, a model or the judge is wrong, or there is no verdict at all.
    """
    folder = Path(os.path.expanduser(args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    chosen = make_judge(args)
    rows = load_rows(args)
    ours, theirs = _answers(args, rows)
    table = pd.DataFrame(
        {
            "prompt": [rows[row]["prompt"] if one is None else one.asked for row, one in enumerate(ours)],
            "model": _texts(ours),
            "opponent": _texts(theirs),
        }
    )
    try:
        compared = compare(chosen, rows, ours, theirs)
    except Exception:
        path = keep(table, folder, "responses")
        print_text(f"The responses are in {path}; judge them with {_again(path)}", sys.stderr)
        raise
    found = add_verdicts(table, compared, isinstance(chosen, ScoringJudge))
    path = keep(table, folder, JUDGED)
    keep_win_rate(found, args, path)
    if found.judged:
        print_text("\n".join(keep_verdict(folder, args, path).lines()))
    show(table, args.num_shown)
    print_text(found)
    if not found.judged:
        raise ValueError(
            f"no verdict on any of {len(table)} prompts; the responses are in {path}: judge them again with "
            f"{_again(path)}"
        )
    print_text(f"The verdicts are in {path}")
    if card := show_judgements(folder.parent if folder.name == JUDGED else folder):
        print_text(f"The win rate is on the model card {card}")
    return found


def _again(path: Path) -> str:
    return f"--dataset_name {shlex.quote(str(path))} --model_column model --opponent_column opponent"


def add_verdicts(table: pd.DataFrame, compared: Sequence[Compared], is_scoring: bool) -> WinRate:
    """Add verdicts to a table, and count them.

    Args:
        table: `model` and `opponent`; gets `verdict`, and `verdict_first` and `verdict_second`, with the model's
            response in the first and second place, each from -1 (the opponent's is better) to 1.
        compared: The judge's verdicts.
        is_scoring: Whether the judge scores each response separately, so that the order has no effect.
    """
    orders = [
        (None if first is None else 1 - 2 * first, None if second is None else 2 * second - 1)
        for first, second in compared
    ]
    verdicts = [each.reward for each in compared]
    table["verdict"] = pd.array(verdicts, dtype="Float64")
    table["verdict_first"] = pd.array([first for first, _ in orders], dtype="Float64")
    table["verdict_second"] = pd.array([second for _, second in orders], dtype="Float64")
    return WinRate.of(
        verdicts,
        table["model"].fillna("").str.len().tolist(),
        table["opponent"].fillna("").str.len().tolist(),
        () if is_scoring else orders,
    )


def make_judge(args: JudgeArguments) -> Any:
    """Return the judge after a test call, so that errors occur before any generation.

    Args:
        args: Name the judge.

    Raises:
        ConnectionError: The server of a chat model does not answer.
        ValueError: There is no such judge.
    """
    if args.asks_chat_model:
        chat = _chat_judge(args)
        finished(chat.check())
        return chat
    if args.judge is not None:
        return as_judge(resolve_reward(args.judge, "judge"))
    judge = RewardModelJudge(str(args.judge_model), trust_remote_code=args.trust_remote_code)
    _refuse_language_model(str(args.judge_model), args.trust_remote_code)
    judge.model  # noqa: B018
    return judge


def check_judge(args: JudgeArguments) -> None:
    """Check the judge's options without calling or loading it.

    Args:
        args: Name the judge.

    Raises:
        OSError, ValueError: There is no such judge, or no key for it.
    """
    if args.asks_chat_model:
        _chat_judge(args)


def _chat_judge(args: JudgeArguments) -> ChatJudge:
    options = OPTIONS if args.judge_options is None else _options(args.judge_options)
    question = QUESTION if args.judge_prompt is None else _question(args.judge_prompt)
    return ChatJudge(str(args.judge_model), args.judge_url or OPENAI_URL, question, options)


def _refuse_language_model(path: str, trust_remote_code: bool) -> None:
    """Reject a language model, whose score head would be random, and name the alternative."""
    try:
        architectures = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).architectures or []
    except (OSError, ValueError):
        return  # loading the model raises a better error
    if any(name.endswith("ForCausalLM") for name in architectures):
        raise ValueError(
            f"judge_model={path!r} is a language model, not a reward model; serve it (`transformers serve`, `vllm "
            "serve`) and give its address as judge_url"
        )


def _question(path: str) -> str:
    try:
        return Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"judge_prompt={path!r} must be a text file with the question: {reason}") from None


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"judge_options={redacted(text)!r} is not JSON: {error}") from None
    if not isinstance(options, dict) or options.keys() & {"model", "messages"}:
        raise ValueError(f"judge_options={redacted(text)!r} must be a JSON object without model and messages")
    return options


def load_rows(args: JudgeArguments) -> Any:
    """Load the prompts, and the responses in columns.

    Raises:
        ValueError: The data or a column is missing.
    """
    rows = choose_split(load_splits(args.dataset_name), args.split, "split")
    rows = separate_prompts(rows.select(range(min(args.num_prompts, len(rows)))), where_missing=True)
    for name in ("model_column", "opponent_column"):
        column = getattr(args, name)
        if column is not None and column not in rows.column_names:
            raise ValueError(f"{name}={column!r}: the data set has only the columns {rows.column_names}")
    if args.model is None and "prompt" not in rows.column_names:
        raise ValueError(f"dataset_name={args.dataset_name!r}: the data set has no column 'prompt'")
    return rows


def _answers(args: JudgeArguments, rows: Any) -> tuple[Sequence[Answer | None], Sequence[Answer | None]]:
    """Return both sides' answers."""
    check_responses(args, rows)
    prompts = rows["prompt"] if "prompt" in rows.column_names else [None] * len(rows)
    named = {name: path for name in ("model", "opponent") if (path := getattr(args, name)) is not None}
    trusts = args.trust_remote_code
    tokenizers = {name: load_tokenizer(path, trusts, name) for name, path in named.items()}  # before any generation
    answers = {name: _respond(args, rows, path, tokenizers[name], name) for name, path in named.items()}
    ours = answers.get("model") or given_answers(prompts, rows[args.model_column])
    return ours, answers.get("opponent") or given_answers(prompts, rows[args.opponent_column], ours)


def check_responses(args: JudgeArguments, rows: Any) -> None:
    """Check that the columns hold texts or messages.

    Raises:
        ValueError: A row holds something else.
    """
    if "prompt" in rows.column_names and "input_ids" not in rows.column_names:
        _check_texts(args.dataset_name, "prompt", rows["prompt"], object)  # a chat template may read other parts
    for column in filter(None, (args.model_column, args.opponent_column)):
        _check_texts(args.dataset_name, column, [text for text in rows[column] if text is not None], str)


def _check_texts(dataset: str, column: str, values: Sequence[Any], content: type) -> None:
    """Raise a `ValueError` unless values are texts, or messages with a content of this type."""
    for value in values:
        is_messages = is_conversation(value) and all(
            isinstance(each, dict) and each.get("content") is not None and isinstance(each["content"], content)
            for each in value
        )
        if not isinstance(value, str) and not is_messages:
            raise ValueError(
                f"dataset_name={dataset!r}: the column {column!r} holds {value!r:.60} ({type(value).__name__}); make "
                "it texts, or lists of messages with role and content"
            )


def _texts(answers: Sequence[Answer | None]) -> list[str | None]:
    return [None if answer is None else answer.response for answer in answers]


def _respond(args: JudgeArguments, rows: Any, path: str, tokenizer: Any, argument: str) -> list[Answer]:
    model: Any = load_pretrained(
        AutoModelForCausalLM, path, argument, dtype="auto", trust_remote_code=args.trust_remote_code
    )
    how = Answering(
        args.max_new_tokens, args.temperature, args.top_p, args.batch_size, args.generation_engine, args.seed,
        template_kwargs(str(args.model or args.opponent), args.chat_template_kwargs),
    )  # fmt: skip
    return respond(model.to(PartialState().device), tokenizer, list(rows), args.dataset_name, how)


def compare(judge: Any, rows: Any, ours: Sequence[Answer | None], theirs: Sequence[Answer | None]) -> list[Compared]:
    """Judge pairs of answers to the same prompts, each in both orders.

    Args:
        judge: A judge, see `rlhf_ppo.rewards.judges.as_judge`.
        rows: The prompts, with the columns that a reward function reads.
        ours: The model's answers; None if missing.
        theirs: The opponent's answers; None if missing.

    Returns:
        The verdicts in both orders.
    """
    columns = {name: list(rows[name]) for name in rows.column_names if name != "prompt"}
    return PreferenceReward(judge, "dataset", name="judge").compare(ours, theirs, columns)


def show(table: pd.DataFrame, num_rows: int) -> None:
    """Print the first judged pairs, with texts cut to a few lines.

    Args:
        table: `prompt`, `model`, `opponent` and `verdict`.
        num_rows: Number of pairs.
    """
    if num_rows > 0:
        texts = table[["prompt", "model", "opponent"]].fillna("")
        print_table(texts.assign(better=table["verdict"].map(_better)), num_rows=num_rows)


def _better(verdict: Any) -> str:
    if pd.isna(verdict):
        return "no verdict"
    return "model" if verdict > 0 else "opponent" if verdict < 0 else "tie"


def keep_verdict(folder: Path, args: JudgeArguments, judged: Path) -> Verdict:
    """Make the verdict on a model, write it into the folder of the judged table, and return it."""
    run = folder.parent if folder.name == JUDGED else args.model
    judgement = Judgement.of(read_win_rate(win_rate_beside(judged)))
    verdict = verdict_of(recorded_runs([run] if run else []), [judgement])
    verdict.save(folder)
    return verdict


def keep_win_rate(found: WinRate, args: JudgeArguments, judged: Path) -> None:
    """Write the win rate beside its table; null if nothing was judged."""
    rate, interval = (found.rate, found.interval()) if found.judged else (None, None)
    written = {"win_rate": rate, "interval": interval, **dataclasses.asdict(found)}
    options = {key: redacted(value, key) for key, value in dataclasses.asdict(args).items() if value is not None}
    write_json(win_rate_beside(judged), {**written, "options": options})
