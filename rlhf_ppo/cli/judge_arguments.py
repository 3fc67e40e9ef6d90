"""Options of `rlhf-ppo judge`."""

import os
import re
from dataclasses import dataclass, field

from rlhf_ppo.config.checks import (
    AtLeastOne,
    Count,
    EngineName,
    PositiveShare,
    Seed,
    Temperature,
    check_ranges,
    option,
    parse_object,
    ranges_of,
)

OPENAI_NAMES = re.compile(r"(gpt|chatgpt|o\d)-[\w.-]+|o\d")
"""Names of OpenAI's models."""

ONE_OF = (("model", "model_column"), ("opponent", "opponent_column"), ("judge_model", "judge"))
"""Pairs of options; `rlhf-ppo judge` needs exactly one of each."""


@dataclass
class JudgeArguments:
    """Responses to compare, prompts, and the judge.

    Raises:
        ValueError: Not exactly one option of a pair of `ONE_OF` is given, a number is outside its range, or an option
            has no effect.
    """

    dataset_name: str = field(
        metadata={"help": "Required. Prompts: a file, a directory or a hub name with the column `prompt`."}
    )
    split: str = option("train", "Split of the dataset.")
    num_prompts: AtLeastOne = option(256, "Number of prompts to use, from the first on.")

    model: str | None = option(None, "Directory or hub name of the model.")
    model_column: str | None = option(None, "Instead of model: the column with its responses.")
    opponent: str | None = option(None, "Model to compare with, such as the one that PPO started from.")
    opponent_column: str | None = option(None, "Instead of opponent: the column with the responses to compare with.")

    judge_model: str | None = option(
        None,
        "Reward model (the higher score wins), or chat model: OpenAI's, such as gpt-4o-mini, with the key in "
        "OPENAI_API_KEY, or one at judge_url.",
    )
    judge_url: str | None = option(
        None,
        "Address of a server with OpenAI's API, such as http://localhost:8000/v1. If it needs a key, put it in "
        "RLHF_PPO_JUDGE_TOKEN.",
    )
    judge: str | None = option(
        None,
        "Instead of judge_model: a reward function (the higher score wins) or a pairwise judge: a name, "
        "package.module.function, file.py:function or an address.",
    )
    judge_prompt: str | None = option(
        None, "File with the question to a chat model, with the fields {prompt}, {first}, {second} and {tag}."
    )
    judge_options: str | None = option(
        None, 'JSON that is sent with each question; by default {"temperature": 0.0, "max_tokens": 16}.'
    )

    max_new_tokens: AtLeastOne = option(128, "Maximum length of a response, in tokens.")
    temperature: Temperature = option(0.7, "Sampling temperature; 0 takes the most likely token.")
    top_p: PositiveShare = option(1.0, "Sample from the most likely tokens whose probabilities sum to top_p.")
    generation_engine: EngineName = option("transformers", "Engine that generates the responses.")
    batch_size: AtLeastOne = option(32, "Prompts in a batch.")
    chat_template_kwargs: str | None = option(
        None,
        'JSON object of further arguments of the chat template, such as {"enable_thinking": false}. None: those that '
        "the model was trained with, if it is a run's directory.",
    )
    seed: Seed = option(0, "Seed of the sampling.")
    trust_remote_code: bool = option(False, "Run Python code of a model's repository. Only for code you have read.")

    output_dir: str = option("judged", "Directory of the results; tables of earlier calls are kept.")
    num_shown: Count = option(5, "Judged pairs to print.")
    dry_run: bool = option(False, "Check data, columns, tokenizers and judge, and exit.")

    def __post_init__(self) -> None:
        """Check the numbers and the pairs of options."""
        ranges = ranges_of(JudgeArguments)
        if self.temperature == 0:
            del ranges["temperature"]
        check_ranges(self, ranges)
        parse_object("chat_template_kwargs", self.chat_template_kwargs, '{"enable_thinking": false}')
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
        is_openais = OPENAI_NAMES.fullmatch(self.judge_model) and not os.path.isdir(self.judge_model)
        return self.judge_url is not None or bool(is_openais)
