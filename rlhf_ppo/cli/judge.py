"""`rlhf-ppo eval`: how often a judge prefers one model's responses to another's, or to the data set's."""

# HfArgumentParser reads the annotations, so they are not postponed.
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, set_seed

from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.parser import PPOArgumentParser
from rlhf_ppo.cli.sources import choose_split, load_splits
from rlhf_ppo.cli.training import load_tokenizer
from rlhf_ppo.config import RANGES
from rlhf_ppo.config.validation import Interval, check_range
from rlhf_ppo.data.encoding import PromptEncoder
from rlhf_ppo.models.loading import load_pretrained
from rlhf_ppo.rewards.builtin import response_texts
from rlhf_ppo.rewards.judges import RewardModelJudge, as_judge
from rlhf_ppo.rewards.preference import PreferenceReward
from rlhf_ppo.rewards.reading import Answer
from rlhf_ppo.rewards.resolve import resolve_reward


@dataclass
class EvalArguments:
    """What is compared, on which prompts, and by whom.

    Raises:
        ValueError: There is not exactly one opponent, or not exactly one judge, or a number is out of its range.
    """

    model: str = field(metadata={"help": "Directory or hub name of the model."})
    dataset_name: str = field(metadata={"help": "A file, a directory or a hub name with a column `prompt`."})
    opponent: str | None = field(default=None, metadata={"help": "The model to compare with, such as the SFT model."})
    opponent_column: str | None = field(default=None, metadata={"help": "Or the column with responses to compare."})
    judge_model: str | None = field(default=None, metadata={"help": "A reward model, whose higher score wins."})
    judge: str | None = field(
        default=None,
        metadata={
            "help": "Or a reward function, whose higher score wins, or a judge of pairs: a name, "
            "package.module.function, file.py:function or an address."
        },
    )
    split: str = field(default="train", metadata={"help": "Split of the data set."})
    num_prompts: int = field(default=256, metadata={"help": "Number of prompts, from the first one on."})
    max_new_tokens: int = field(default=128, metadata={"help": "Longest response, in tokens."})
    temperature: float = field(default=0.7, metadata={"help": "Sampling temperature."})
    batch_size: int = field(default=32, metadata={"help": "Prompts at a time."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})

    def __post_init__(self) -> None:
        """Check the numbers, and that there is one opponent and one judge."""
        helps = {option.name: option.metadata["help"] for option in dataclasses.fields(self)}
        for name in ("num_prompts", "max_new_tokens", "batch_size"):
            check_range(name, getattr(self, name), Interval(1, math.inf), helps[name])
        check_range("seed", self.seed, Interval(0, 2**32 - 1), helps["seed"])
        check_range("temperature", self.temperature, RANGES["temperature"], helps["temperature"])
        for one, other in (("opponent", "opponent_column"), ("judge_model", "judge")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise ValueError(
                    f"{one}={getattr(self, one)!r} and {other}={getattr(self, other)!r}: give one of them"
                )


@dataclass(frozen=True)
class WinRate:
    """The verdicts on all prompts, each asked in both orders.

    Attributes:
        wins: Number of prompts where the model's response is the better one.
        losses: Number of prompts where the opponent's is.
        ties: Number of prompts where neither is.
        failed: Number of prompts without a verdict.
    """

    wins: int
    losses: int
    ties: int
    failed: int

    def __str__(self) -> str:
        """Write the share of judged prompts won, a tie counting half."""
        judged = self.wins + self.losses + self.ties
        rate = (self.wins + self.ties / 2) / judged if judged else float("nan")
        return f"Model win rate: {100 * rate:.2f}% of {judged} ({self.ties} ties; {self.failed} failed verdicts)"


def evaluate(argv: Sequence[str] | None = None) -> WinRate:
    """Let two models, or a model and the data set, answer the same prompts, and print the share that the model wins.

    Args:
        argv: The options of `EvalArguments`. None takes the program's own.

    Returns:
        The verdicts.

    Raises:
        SystemExit: An option, the data, a model or the judge is wrong; the message names it.
    """
    parser: Any = PPOArgumentParser(EvalArguments, prog="rlhf-ppo eval")  # pyright: ignore[reportArgumentType]
    with user_errors(parser.prog):
        (args,) = parser.parse_args_and_config(argv)
        judge = (
            as_judge(resolve_reward(args.judge)) if args.judge is not None else RewardModelJudge(str(args.judge_model))
        )
        rows = _rows(args)
        if isinstance(judge, RewardModelJudge):
            judge.model  # noqa: B018  a wrong path is an error before anything is sampled
        ours = respond(args.model, rows, args)
        if args.opponent is None:
            theirs = given_answers(ours, rows[args.opponent_column])
        else:
            theirs = respond(args.opponent, rows, args, "opponent")
        found = compare(judge, rows, ours, theirs)
    print(found)
    return found


def _rows(args: EvalArguments) -> Any:
    rows = choose_split(load_splits(args.dataset_name), args.split, "split")
    if args.opponent_column is not None and args.opponent_column not in rows.column_names:
        raise ValueError(
            f"opponent_column={args.opponent_column!r}: the data set has only the columns {rows.column_names}"
        )
    return rows.select(range(min(args.num_prompts, len(rows))))


def compare(judge: Any, rows: Any, ours: Sequence[Answer], theirs: Sequence[Answer | None]) -> WinRate:
    """Judge pairs of answers to the same prompts.

    Args:
        judge: What `rlhf_ppo.rewards.judges.as_judge` takes.
        rows: The prompts, with the columns that a reward function reads.
        ours: The model's answers.
        theirs: The opponent's, None where there is none.
    """
    columns = {name: list(rows[name]) for name in rows.column_names if name != "prompt"}
    verdicts = PreferenceReward(judge, "dataset", name="judge").compare(ours, theirs, columns)
    judged = [verdict for verdict in verdicts if verdict is not None]
    wins, losses = sum(verdict > 0 for verdict in judged), sum(verdict < 0 for verdict in judged)
    return WinRate(wins, losses, len(judged) - wins - losses, len(verdicts) - len(judged))


def given_answers(ours: Sequence[Answer], responses: Sequence[Any]) -> list[Answer | None]:
    """Return the data set's responses as answers to the same prompts.

    Args:
        ours: The model's answers.
        responses: Texts, lists of messages, or None.
    """
    return [
        None
        if response is None
        else Answer(one.prompt, response_texts([response])[0], prompt_ids=one.prompt_ids, tokenizer=one.tokenizer)
        for one, response in zip(ours, responses, strict=True)
    ]


@torch.no_grad()
def respond(path: str, rows: Any, args: EvalArguments, argument: str = "model") -> list[Answer]:
    """Sample one response to each prompt.

    Args:
        path: The model's directory or hub name.
        rows: The prompts.
        args: How to sample.
        argument: The option that gave the path, for error messages.
    """
    model: Any = load_pretrained(AutoModelForCausalLM, path, argument, dtype="auto")
    tokenizer: Any = load_tokenizer(path, False, argument)
    model = model.to(PartialState().device)
    encode = PromptEncoder(tokenizer, args.dataset_name, len(tokenizer))
    encoded = [{**row, **encode(row, index)} for index, row in enumerate(rows)]
    ids = [{"input_ids": row["input_ids"]} for row in encoded]
    ends = _end_tokens(model, tokenizer)
    set_seed(args.seed)
    answers: list[Answer] = []
    for start in range(0, len(encoded), args.batch_size):
        batch = tokenizer.pad(ids[start : start + args.batch_size], return_tensors="pt").to(model.device)
        sequences = model.generate(
            **batch, max_new_tokens=args.max_new_tokens, do_sample=True, temperature=args.temperature, top_k=0
        )
        for row, sampled in zip(encoded[start:], sequences[:, batch["input_ids"].shape[1] :].tolist(), strict=False):
            answers.append(_answer(row, sampled, ends, tokenizer))
    return answers


def _answer(row: Mapping[str, Any], sampled: list[int], ends: set[int], tokenizer: Any) -> Answer:
    """Cut what was sampled behind its first end token."""
    length = next((index + 1 for index, token in enumerate(sampled) if token in ends), len(sampled))
    response, prompt = sampled[:length], row.get("prompt")
    text = tokenizer.decode(response, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Answer(prompt, text, bool(response) and response[-1] in ends, row["input_ids"], response, tokenizer)


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Collect the tokens at which `generate` ends a row, one or several, and the tokenizer's EOS."""
    configured = model.generation_config.eos_token_id
    several = configured if isinstance(configured, list) else [configured]
    return {token for token in (*several, tokenizer.eos_token_id) if token is not None}
