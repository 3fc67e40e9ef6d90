"""`rlhf-ppo judge`: the share of prompts for which a judge prefers one model's response."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from rlhf_ppo.cli.answers import answers_in_column, end_tokens, prompt_encoder, respond, template_kwargs
from rlhf_ppo.cli.arguments import parse
from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.judge_arguments import JudgeArguments
from rlhf_ppo.cli.trainers import load_tokenizer
from rlhf_ppo.config.checks import parse_object
from rlhf_ppo.data.files import write_json
from rlhf_ppo.data.sources import choose_split, load_splits, separate_prompts
from rlhf_ppo.models.adapters import base_of_adapter, is_adapter_directory
from rlhf_ppo.models.capabilities import stated_limit
from rlhf_ppo.models.loading import load_policy, load_pretrained
from rlhf_ppo.reporting.judgements import JUDGED, Judgement, keep, updates_at_end, win_rate_beside
from rlhf_ppo.reporting.model_card import show_judgements
from rlhf_ppo.reporting.run_log import RunSettings
from rlhf_ppo.reporting.sample_tables import print_table
from rlhf_ppo.reporting.verdict import recorded_runs, verdict_of
from rlhf_ppo.reporting.win_rate import WinRate
from rlhf_ppo.rewards.builtin import prompt_text
from rlhf_ppo.rewards.functions import finished
from rlhf_ppo.rewards.identity import judge_identities
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
from rlhf_ppo.rewards.scorer import Answer
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
    (args,) = parse((JudgeArguments,), prog, argv)
    with user_errors(prog):
        check_single_process()
        if not args.dry_run:
            return judge_responses(args)
        prepare(args)
    print_text(f"Dry run: no problems found; the verdicts would be in {args.output_dir}.")
    return None


def check_single_process() -> None:
    """Raise a `ValueError` if there are several processes, each of which would do all of the work."""
    # Launchers set both variables; accelerate's own count is 1 on CPUs.
    processes = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if processes > 1:
        raise ValueError(f"num_processes={processes}: responses are judged in a single process; start only one")


def judge_responses(args: JudgeArguments) -> WinRate:
    """Generate missing responses, ask the judge, and print and save the verdicts.

    Raises:
        ConnectionError: The server of a judge does not answer.
        OSError, ValueError: The data, a model or the judge is wrong, or there is no verdict at all.
    """
    folder = Path(os.path.expanduser(args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    chosen, rows, tokenizers = prepare(args)
    ours, theirs = _answers(args, rows, tokenizers)
    table = pd.DataFrame(
        {
            "prompt": [rows[row]["prompt"] if one is None else one.asked for row, one in enumerate(ours)],
            "model": [one and one.response for one in ours],
            "opponent": [one and one.response for one in theirs],
        }
    )
    try:
        compared = compare(chosen, rows, ours, theirs)
    except Exception:
        path = keep(table, folder, "responses")
        print_text(f"The responses are in {path}; judge them with {_again(path)}", sys.stderr)
        raise
    win_rate = add_verdicts(table, compared, isinstance(chosen, ScoringJudge))
    path = keep(table, folder, JUDGED)
    run = args.model or (folder.parent if folder.name == JUDGED else None)
    keep_win_rate(win_rate, args, path, judge_identities(chosen), run)
    if args.num_shown > 0:
        texts: Any = table[["prompt", "model", "opponent"]].fillna("")
        shown = texts.assign(prompt=texts["prompt"].map(prompt_text), better=table["verdict"].map(_better))
        print_table(shown, num_rows=args.num_shown)
    print_text(win_rate)
    if not win_rate.judged:
        raise ValueError(f"no verdict on any of {len(table)} prompts; judge them again with {_again(path)}")
    verdict = verdict_of(recorded_runs([run] if run else []), [Judgement.read(win_rate_beside(path))])
    verdict.save(folder)
    print_text("\n".join(verdict.lines()))
    print_text(f"The verdicts are in {path}")
    if card := show_judgements(folder.parent if folder.name == JUDGED else folder):
        print_text(f"The win rate is on the model card {card}")
    return win_rate


def prepare(args: JudgeArguments) -> tuple[Any, Dataset, dict[str, PreTrainedTokenizerBase]]:
    """Return the judge, the prompts that fit, and the tokenizer of each model that responds.

    Raises:
        OSError, ValueError: The data, a tokenizer or the judge is wrong.
    """
    chosen = make_judge(args)
    rows = load_rows(args)
    trusts, named = args.trust_remote_code, {"model": args.model, "opponent": args.opponent}
    tokenizers = {name: load_tokenizer(path, trusts, name) for name, path in named.items() if path is not None}
    return chosen, fitting_rows(args, rows, tokenizers, chosen), tokenizers


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
    verdicts = [pair.reward for pair in compared]
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
        chat = chat_judge(args)
        finished(chat.check())
        return chat
    if args.judge is not None:
        return as_judge(resolve_reward(args.judge, "judge"))
    path, trusts = str(args.judge_model), args.trust_remote_code
    architectures = []
    with contextlib.suppress(OSError, ValueError):  # loading the model raises a better error
        architectures = AutoConfig.from_pretrained(path, trust_remote_code=trusts).architectures or []
    if any(name.endswith("ForCausalLM") for name in architectures):  # its score head would be random
        raise ValueError(
            f"judge_model={path!r} is a language model, not a reward model; serve it (`transformers serve`, `vllm "
            "serve`) and give its address as judge_url"
        )
    judge = RewardModelJudge(path, trust_remote_code=trusts, argument="judge_model")
    judge.model  # noqa: B018
    return judge


def chat_judge(args: JudgeArguments) -> ChatJudge:
    """Return the chat model that judges, without a request.

    Raises:
        OSError, TypeError, ValueError: The key, the options or the question is wrong.
    """
    given = parse_object("judge_options", args.judge_options, '{"temperature": 0}')
    options = OPTIONS if given is None else given
    path = args.judge_prompt
    question = QUESTION if path is None else Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    return ChatJudge(str(args.judge_model), args.judge_url or OPENAI_URL, question, options)


def load_rows(args: JudgeArguments) -> Dataset:
    """Load the prompts, and the responses in columns.

    Raises:
        ValueError: The data or a column is missing.
    """
    rows = choose_split(load_splits(args.dataset_name), args.split, "split")
    rows = separate_prompts(rows.select(range(min(args.num_prompts, len(rows)))), where_missing=True)
    wanted = (args.model_column, args.opponent_column, "prompt" if args.model is None else None)
    if missing := [column for column in wanted if column is not None and column not in rows.column_names]:
        raise ValueError(
            f"dataset_name={args.dataset_name!r} has no column {missing[0]!r}, but {rows.column_names}: rename one, "
            "or name another with model_column or opponent_column"
        )
    if args.model is None and None in rows["prompt"]:
        raise ValueError(f"dataset_name={args.dataset_name!r}: row {[*rows['prompt']].index(None)} has no prompt")
    return rows


def fitting_rows(
    args: JudgeArguments, rows: Dataset, tokenizers: Mapping[str, PreTrainedTokenizerBase], judge: object
) -> Dataset:
    """Drop prompts that leave no room for a response in a model or the judge, or that PPO dropped; print how many.

    Args:
        args: The models, and `max_new_tokens`.
        rows: The prompts.
        tokenizers: The tokenizer of each model that responds.
        judge: The judge.

    Raises:
        ValueError: A prompt cannot be read, or none is left.
    """
    for name, tokenizer in tokenizers.items():
        path = getattr(args, name)
        longest = _longest_prompt(args, name, tokenizer, judge)
        encode = prompt_encoder(args, tokenizer)
        kept = [index for index, row in enumerate(rows) if len(encode(row, index)["input_ids"]) <= longest]
        told = f"{len(rows) - len(kept)} of {len(rows)} prompts, longer than {longest} tokens"
        if not kept:
            what = f"any of {len(rows)} prompts of dataset_name={args.dataset_name!r} in {name}={path!r} or the judge"
            raise ValueError(f"max_new_tokens={args.max_new_tokens} leaves no room for {what}: lower it")
        if len(kept) < len(rows):
            print_text(f"{args.dataset_name}: dropped {told}")
        rows = rows.select(kept)
    return rows


def _longest_prompt(args: JudgeArguments, name: str, tokenizer: PreTrainedTokenizerBase, judge: object) -> float:
    path = getattr(args, name)
    base: Any = base_of_adapter(path) if is_adapter_directory(path) else path
    config: Any = load_pretrained(AutoConfig, base, name, trust_remote_code=args.trust_remote_code)
    limit = stated_limit(config.get_text_config(), path)
    totals = [limit and limit.tokens, isinstance(judge, RewardModelJudge) and judge.positions_of(tokenizer)]
    rooms = [total - args.max_new_tokens for total in totals if total]
    return min([*rooms, RunSettings.load(path).arguments.get("max_prompt_length") or math.inf])


def _answers(
    args: JudgeArguments, rows: Any, tokenizers: Mapping[str, PreTrainedTokenizerBase]
) -> tuple[Sequence[Answer | None], Sequence[Answer | None]]:
    """Return both sides' answers."""
    answers, how = {name: _respond(args, rows, tokenizers, name) for name in tokenizers}, template_kwargs(args)
    theirs = answers.get("opponent", ())
    ours = answers.get("model") or answers_in_column(list(rows), str(args.model_column), theirs, how)
    return ours, theirs or answers_in_column(list(rows), str(args.opponent_column), ours, how)


def _respond(
    args: JudgeArguments, rows: Any, tokenizers: Mapping[str, PreTrainedTokenizerBase], argument: str
) -> list[Answer]:
    path, trusts, tokenizer = getattr(args, argument), args.trust_remote_code, tokenizers[argument]
    loaded = load_pretrained(AutoModelForCausalLM, path, argument, dtype="auto", trust_remote_code=trusts)
    model: Any = load_policy(loaded, argument)
    config, recorded = model.generation_config, RunSettings.load(str(args.model or args.opponent)).arguments
    config.stop_strings = config.stop_strings or recorded.get("stop_strings")
    stop = recorded.get("stop_token_id")
    if stop is not None and argument == "opponent":  # its tokenizer may give the same token another id
        token = next(iter(tokenizers.values())).convert_ids_to_tokens(stop)
        stop = tokenizer.get_vocab().get(str(token))
    config.eos_token_id = end_tokens(model, tokenizer, stop)
    return respond(model.to(PartialState().device), tokenizer, list(rows), args)


def compare(
    judge: Any, rows: Dataset, ours: Sequence[Answer | None], theirs: Sequence[Answer | None]
) -> list[Compared]:
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


def _better(verdict: Any) -> str:
    if pd.isna(verdict):
        return "no verdict"
    return "model" if verdict > 0 else "opponent" if verdict < 0 else "tie"


def keep_win_rate(
    win_rate: WinRate, args: JudgeArguments, judged: Path, identities: Sequence[str], run: str | Path | None
) -> None:
    """Write the win rate (null if nothing was judged), the options, the judge's identities and the run's record.

    Args:
        win_rate: The win rate.
        args: The options.
        judged: The table, beside which the file is written.
        identities: Of the judge.
        run: The directory of the run that trained the policy, or None.
    """
    rate, interval = (win_rate.rate, win_rate.interval()) if win_rate.judged else (None, None)
    written = {"win_rate": rate, "interval": interval, **dataclasses.asdict(win_rate)}
    options = {key: redacted(value, key) for key, value in dataclasses.asdict(args).items() if value is not None}
    content = {**written, "judge_identities": identities, "options": options}
    if run is not None and (settings := RunSettings.load(run)).arguments:
        updates = updates_at_end(run) if args.model else None  # responses of a column may be older
        seed = settings.arguments.get("seed")
        content["run"] = {"seed": seed, "without_seed": settings.without_seed(), "updates": updates}
    write_json(win_rate_beside(judged), content)
