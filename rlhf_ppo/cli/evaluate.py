"""`rlhf-ppo eval`: how often a judge prefers one model's responses to another's, or to the data set's."""

# HfArgumentParser reads the annotations, so they are not postponed.
import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed

from rlhf_ppo.cli.sources import choose_split, load_splits
from rlhf_ppo.prompts import PromptEncoder
from rlhf_ppo.rewards.builtin import response_texts
from rlhf_ppo.rewards.preference import PreferenceReward, RewardModelJudge
from rlhf_ppo.rewards.resolve import resolve_reward


@dataclass
class EvalArguments:
    """What is compared, on which prompts, and by whom.

    Raises:
        ValueError: There is not exactly one opponent, or not exactly one judge.
    """

    model: str = field(metadata={"help": "Directory or hub name of the model."})
    dataset_name: str = field(metadata={"help": "A file, a directory or a hub name with a column `prompt`."})
    opponent: str | None = field(default=None, metadata={"help": "The model to compare with, such as the SFT model."})
    opponent_column: str | None = field(default=None, metadata={"help": "Or the column with responses to compare."})
    judge_model: str | None = field(default=None, metadata={"help": "A reward model, whose higher score wins."})
    judge: str | None = field(
        default=None,
        metadata={"help": "Or a reward function of texts: a name, package.module.function or file.py:function."},
    )
    split: str = field(default="train", metadata={"help": "Split of the data set."})
    num_prompts: int = field(default=256, metadata={"help": "Number of prompts, from the first one on."})
    max_new_tokens: int = field(default=128, metadata={"help": "Longest response, in tokens."})
    temperature: float = field(default=0.7, metadata={"help": "Sampling temperature."})
    batch_size: int = field(default=32, metadata={"help": "Prompts at a time."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})

    def __post_init__(self) -> None:
        """Check that there is one opponent and one judge."""
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
    """
    parser: Any = HfArgumentParser(EvalArguments, prog="rlhf-ppo eval")  # pyright: ignore[reportArgumentType]
    try:
        (args,) = parser.parse_args_into_dataclasses(argv)
    except ValueError as error:
        parser.error(str(error))
    rows = choose_split(load_splits(args.dataset_name), args.split, "split")
    rows = rows.select(range(min(args.num_prompts, len(rows))))
    ours = respond(args.model, rows, args)
    theirs = list(rows[args.opponent_column]) if args.opponent is None else respond(args.opponent, rows, args)
    found = compare(args.judge_model or resolve_reward(args.judge), rows, ours, theirs)
    print(found)
    return found


def compare(judge: str | Callable[..., Any], rows: Any, ours: Sequence[str], theirs: Sequence[Any]) -> WinRate:
    """Judge pairs of responses to the same prompts.

    Args:
        judge: Path of a reward model, or a reward function with `GRPOTrainer`'s signature.
        rows: The prompts, with the columns that the function reads.
        ours: The model's responses.
        theirs: The opponent's, as texts or messages.
    """
    prompts, others = list(rows["prompt"]), response_texts(theirs)
    if isinstance(judge, str):
        preferred = PreferenceReward(RewardModelJudge(judge), "dataset", "opponent")
        verdicts = preferred(prompts, ours, opponent=others)
    else:
        columns = {name: list(rows[name]) for name in rows.column_names if name != "prompt"}
        scores = [_finished(judge(prompts=prompts, completions=list(texts), **columns)) for texts in (ours, others)]
        verdicts = [None if None in pair else pair[0] - pair[1] for pair in zip(*scores, strict=True)]
    judged = [verdict for verdict in verdicts if verdict is not None]
    wins, losses = sum(verdict > 0 for verdict in judged), sum(verdict < 0 for verdict in judged)
    return WinRate(wins, losses, len(judged) - wins - losses, len(verdicts) - len(judged))


@torch.no_grad()
def respond(path: str, rows: Any, args: EvalArguments) -> list[str]:
    """Sample one response to each prompt, without special tokens.

    Args:
        path: The model's directory or hub name.
        rows: The prompts.
        args: How to sample.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    model = model.to(PartialState().device)
    encode = PromptEncoder(tokenizer, args.dataset_name, len(tokenizer))
    encoded = [{"input_ids": encode(row, index)["input_ids"]} for index, row in enumerate(rows)]
    set_seed(args.seed)
    responses: list[str] = []
    for start in range(0, len(encoded), args.batch_size):
        batch = tokenizer.pad(encoded[start : start + args.batch_size], return_tensors="pt").to(model.device)
        sequences = model.generate(
            **batch, max_new_tokens=args.max_new_tokens, do_sample=True, temperature=args.temperature, top_k=0
        )
        answers = sequences[:, batch["input_ids"].shape[1] :]
        responses += cast(list[str], tokenizer.batch_decode(answers, skip_special_tokens=True))
    return responses


def _finished(scores: Any) -> Any:
    return asyncio.run(scores) if inspect.iscoroutine(scores) else scores
