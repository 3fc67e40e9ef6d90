"""`rlhf-ppo judge`: how often a judge prefers one model's responses to another's, or to the data set's."""

# HfArgumentParser reads the annotations, so they are not postponed.
import dataclasses
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_ppo.checkpoints.jsonfile import write_json
from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.parser import PPOArgumentParser
from rlhf_ppo.cli.sources import choose_split, load_splits
from rlhf_ppo.cli.training import load_tokenizer
from rlhf_ppo.config import RANGES
from rlhf_ppo.config.redaction import shown
from rlhf_ppo.config.validation import Interval, check_range
from rlhf_ppo.data.encoding import is_conversation
from rlhf_ppo.evaluation.answering import Answering, given_answers, respond
from rlhf_ppo.evaluation.win_rate import WinRate
from rlhf_ppo.models.loading import load_pretrained
from rlhf_ppo.reporting.judgements import JUDGED, keep, win_rate_beside
from rlhf_ppo.reporting.run_card import show_judgements
from rlhf_ppo.rewards.chat_judge import OPENAI_URL, OPTIONS, QUESTION, ChatJudge
from rlhf_ppo.rewards.functions import finished
from rlhf_ppo.rewards.judges import RewardModelJudge, ScoringJudge, as_judge
from rlhf_ppo.rewards.preference import Compared, PreferenceReward
from rlhf_ppo.rewards.reading import Answer
from rlhf_ppo.rewards.resolve import check_reward_name, resolve_reward
from rlhf_ppo.terminal.foreign import cell, print_text

OPENAI_NAMES = re.compile(r"(gpt|chatgpt|o\d)-[\w.-]+|o\d")
"""Names of models that are asked at OpenAI's API."""

ONE_OF = (("model", "model_column"), ("opponent", "opponent_column"), ("judge_model", "judge"))


@dataclass
class JudgeArguments:
    """What is compared, on which prompts, and by whom.

    Raises:
        ValueError: There is not exactly one of each of `ONE_OF`, a number is out of its range, or an option is given
            that nothing reads.
    """

    dataset_name: str = field(metadata={"help": "A file, a directory or a hub name with a column `prompt`."})
    model: str | None = field(default=None, metadata={"help": "Directory or hub name of the model."})
    model_column: str | None = field(default=None, metadata={"help": "Or the column with its responses."})
    opponent: str | None = field(default=None, metadata={"help": "The model to compare with, such as the SFT model."})
    opponent_column: str | None = field(default=None, metadata={"help": "Or the column with responses to compare."})
    judge_model: str | None = field(
        default=None,
        metadata={
            "help": "A reward model, whose higher score wins; or, with judge_url, the name of a model at that server; "
            "or a model of OpenAI's, such as gpt-4o-mini, with the key in the environment variable OPENAI_API_KEY."
        },
    )
    judge_url: str | None = field(
        default=None,
        metadata={
            "help": "Address of a server with OpenAI's API, such as http://localhost:8000/v1; if it wants a key, set "
            "the environment variable RLHF_PPO_JUDGE_TOKEN."
        },
    )
    judge: str | None = field(
        default=None,
        metadata={
            "help": "Or a reward function, whose higher score wins, or a judge of pairs: a name, "
            "package.module.function, file.py:function or an address."
        },
    )
    judge_prompt: str | None = field(
        default=None,
        metadata={
            "help": "File with what a chat model is asked, with the fields {prompt}, {first} and {second}, and {tag}."
        },
    )
    judge_options: str | None = field(
        default=None,
        metadata={"help": 'JSON sent beside model and messages; by default {"temperature": 0.0, "max_tokens": 16}.'},
    )
    split: str = field(default="train", metadata={"help": "Split of the data set."})
    num_prompts: int = field(default=256, metadata={"help": "Number of prompts, from the first one on."})
    max_new_tokens: int = field(default=128, metadata={"help": "Longest response, in tokens."})
    temperature: float = field(
        default=0.7, metadata={"help": "Sampling temperature; 0 takes the most likely token at each step."}
    )
    top_p: float = field(default=1.0, metadata={"help": "Share of the probability that is sampled from."})
    generation_engine: Literal["transformers", "continuous", "vllm"] = field(
        default="transformers", metadata={"help": "What generates the responses."}
    )
    batch_size: int = field(default=32, metadata={"help": "Prompts at a time."})
    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "Run the Python code that a model's repository brings along. Only for code you have read."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})
    output_dir: str = field(
        default="judged", metadata={"help": "Where judged.parquet and win_rate.json go; none is overwritten."}
    )
    num_shown: int = field(default=5, metadata={"help": "Judged pairs in the terminal."})

    def __post_init__(self) -> None:
        """Check the numbers, and that there is one of each."""
        helps = {option.name: option.metadata["help"] for option in dataclasses.fields(self)}
        for name in ("num_prompts", "max_new_tokens", "batch_size"):
            check_range(name, getattr(self, name), Interval(1, math.inf), helps[name])
        check_range("num_shown", self.num_shown, Interval(0, math.inf), helps["num_shown"])
        check_range("seed", self.seed, Interval(0, 2**32 - 1), helps["seed"])
        if self.temperature != 0:
            check_range("temperature", self.temperature, RANGES["temperature"], helps["temperature"])
        check_range("top_p", self.top_p, RANGES["top_p"], helps["top_p"])
        for one, other in ONE_OF:
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise ValueError(
                    f"{one}={getattr(self, one)!r} and {other}={getattr(self, other)!r}: give one of them"
                )
        for name in ("judge_url", "judge_prompt", "judge_options"):
            if getattr(self, name) is not None and not self.asks_chat_model:
                raise ValueError(f"{name} is for a chat model; name it as judge_model, such as gpt-4o-mini")

    @property
    def asks_chat_model(self) -> bool:
        """Whether the judge is a chat model at a server."""
        if self.judge_model is None:
            return False
        return self.judge_url is not None or OPENAI_NAMES.fullmatch(self.judge_model) is not None


def judge(argv: Sequence[str] | None = None, prog: str = "rlhf-ppo judge") -> WinRate:
    """Let two models, or a model and the data set, answer the same prompts, and print the share that the model wins.

    Args:
        argv: The options of `JudgeArguments`. None takes the program's own.
        prog: What errors begin with.

    Returns:
        The verdicts.

    Raises:
        SystemExit: An option, the data, a model or the judge is wrong; the message names it.
    """
    parser: Any = PPOArgumentParser(JudgeArguments, prog=prog)  # pyright: ignore[reportArgumentType]
    with user_errors(parser.prog):
        (args,) = parser.parse_args_and_config(argv)
        return judge_responses(args)


def evaluate(argv: Sequence[str] | None = None) -> WinRate:
    """Judge under the command's other name, `rlhf-ppo eval`; see `judge`."""
    return judge(argv, prog="rlhf-ppo eval")


def judge_responses(args: JudgeArguments) -> WinRate:
    """Generate what is missing, ask the judge, print and keep what it said.

    Args:
        args: What is compared.

    Raises:
        ConnectionError: A judge behind an address cannot be asked.
        OSError, ValueError: The data, a model or the judge is wrong, or it gave no verdict at all.
    """
    folder = _folder(args.output_dir)
    chosen = make_judge(args)
    rows = _rows(args)
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
    show(table, args.num_shown)
    print_text(found)
    path = keep(table, folder, JUDGED)
    keep_win_rate(found, args, path)
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
    return f"--dataset_name {path} --model_column model --opponent_column opponent"


def add_verdicts(table: pd.DataFrame, compared: Sequence[Compared], is_scoring: bool) -> WinRate:
    """Put verdicts into a table, and count them.

    Args:
        table: `model` and `opponent`; gets `verdict`, and `verdict_first` and `verdict_second`, where the model's
            response was asked about first and second, each from -1 (the opponent's is better) to 1.
        compared: What the judge said.
        is_scoring: Whether the judge scores each response by itself, so that their order cannot matter.
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


def _folder(output_dir: str) -> Path:
    folder = Path(output_dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir={output_dir!r} is a file; name a directory")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_judge(args: JudgeArguments) -> Any:
    """Return the judge, after a first try: what is wrong with it shows before anything is generated.

    Args:
        args: Which judge.

    Raises:
        ConnectionError: A chat model cannot be asked.
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
    """Check the judge as far as nothing is asked, run or loaded.

    Args:
        args: Which judge.

    Raises:
        OSError, ValueError: There is no such judge, or no key for it.
    """
    if args.asks_chat_model:
        _chat_judge(args)
    elif args.judge is not None:
        check_reward_name(args.judge, "judge")


def _chat_judge(args: JudgeArguments) -> ChatJudge:
    options = OPTIONS if args.judge_options is None else _options(args.judge_options)
    question = QUESTION if args.judge_prompt is None else _question(args.judge_prompt)
    return ChatJudge(str(args.judge_model), args.judge_url or OPENAI_URL, question, options)


def _refuse_language_model(path: str, trust_remote_code: bool) -> None:
    """Say how a language model judges, rather than give it a score head with random weights."""
    try:
        architectures = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).architectures or []
    except (OSError, ValueError):
        return  # which loading the model will say better
    if any(name.endswith("ForCausalLM") for name in architectures):
        raise ValueError(
            f"judge_model={path!r} is a language model, not a reward model; serve it (`transformers serve`, `vllm "
            "serve`) and give its address as judge_url"
        )


def _question(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"judge_prompt={path!r} must be a text file with the question: {reason}") from None


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"judge_options={shown(text)!r} is no JSON: {error}") from None
    if not isinstance(options, dict) or options.keys() & {"model", "messages"}:
        raise ValueError(f"judge_options={shown(text)!r} must be a JSON object without model and messages")
    return options


def _rows(args: JudgeArguments) -> Any:
    rows = choose_split(load_splits(args.dataset_name), args.split, "split")
    for name in ("model_column", "opponent_column"):
        column = getattr(args, name)
        if column is not None and column not in rows.column_names:
            raise ValueError(f"{name}={column!r}: the data set has only the columns {rows.column_names}")
    if args.model is None and "prompt" not in rows.column_names:
        raise ValueError(f"dataset_name={args.dataset_name!r}: the data set has no column 'prompt'")
    return rows.select(range(min(args.num_prompts, len(rows))))


def _answers(args: JudgeArguments, rows: Any) -> tuple[Sequence[Answer | None], Sequence[Answer | None]]:
    """Return both sides' answers."""
    prompts = rows["prompt"] if "prompt" in rows.column_names else [None] * len(rows)
    if "prompt" in rows.column_names and "input_ids" not in rows.column_names:
        _check_texts(args.dataset_name, "prompt", prompts, object)  # a chat template may read parts of other kinds
    for column in filter(None, (args.model_column, args.opponent_column)):
        _check_texts(args.dataset_name, column, [text for text in rows[column] if text is not None], str)
    named = {name: path for name in ("model", "opponent") if (path := getattr(args, name)) is not None}
    trusts = args.trust_remote_code
    tokenizers = {name: load_tokenizer(path, trusts, name) for name, path in named.items()}  # of both before either
    if args.model is not None:
        ours = _respond(args, rows, args.model, tokenizers["model"], "model")
    else:
        ours = given_answers(prompts, rows[args.model_column])
    if args.opponent is not None:
        return ours, _respond(args, rows, args.opponent, tokenizers["opponent"], "opponent")
    return ours, given_answers(prompts, rows[args.opponent_column], ours)


def _check_texts(dataset: str, column: str, values: Sequence[Any], content: type) -> None:
    """Check that values are texts, or messages with a content of this type.

    Raises:
        ValueError: One is something else.
    """
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
        args.max_new_tokens, args.temperature, args.top_p, args.batch_size, args.generation_engine, args.seed
    )
    return respond(model.to(PartialState().device), tokenizer, list(rows), args.dataset_name, how)


def compare(judge: Any, rows: Any, ours: Sequence[Answer | None], theirs: Sequence[Answer | None]) -> list[Compared]:
    """Judge pairs of answers to the same prompts, each in both orders.

    Args:
        judge: What `rlhf_ppo.rewards.judges.as_judge` takes.
        rows: The prompts, with the columns that a reward function reads.
        ours: The model's answers, None where there is none.
        theirs: The opponent's, likewise.

    Returns:
        The verdicts in both orders.
    """
    columns = {name: list(rows[name]) for name in rows.column_names if name != "prompt"}
    return PreferenceReward(judge, "dataset", name="judge").compare(ours, theirs, columns)


def show(table: pd.DataFrame, num_rows: int) -> None:
    """Print the first judged pairs.

    Args:
        table: `prompt`, `model`, `opponent` and `verdict`.
        num_rows: How many.
    """
    if num_rows == 0:
        return
    printed = Table("prompt", "model", "opponent", "better", show_lines=True)
    for row in table.head(num_rows).to_dict("records"):
        texts = [cell("" if pd.isna(row[name]) else row[name]) for name in ("prompt", "model", "opponent")]
        printed.add_row(*texts, _better(row["verdict"]))
    Console().print(printed)


def _better(verdict: Any) -> str:
    if pd.isna(verdict):
        return "no verdict"
    return "model" if verdict > 0 else "opponent" if verdict < 0 else "tie"


def keep_win_rate(found: WinRate, args: JudgeArguments, judged: Path) -> None:
    """Write the win rate beside the table that it is of; null where nothing was judged.

    Args:
        found: The win rate.
        args: The options.
        judged: The table.
    """
    rate, interval = (found.rate, found.interval()) if found.judged else (None, None)
    said = {"win_rate": rate, "interval": interval, **dataclasses.asdict(found)}
    options = {key: shown(value, key) for key, value in dataclasses.asdict(args).items() if value is not None}
    write_json(win_rate_beside(judged), {**said, "options": options})
