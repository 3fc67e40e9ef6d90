"""The command `rlhf-ppo generate`: responses of a policy, chosen by its critic."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import AutoModelForCausalLM, set_seed

from rlhf_ppo.checkpoints.files import write_text
from rlhf_ppo.cli.arguments import PPOArgumentParser
from rlhf_ppo.cli.checks import Problems, parse
from rlhf_ppo.cli.errors import program_name, user_errors
from rlhf_ppo.cli.training import load_tokenizer
from rlhf_ppo.config.validation import (
    AtLeastOne,
    Count,
    PositiveShare,
    Seed,
    Temperature,
    check_ranges,
    option,
    ranges_of,
)
from rlhf_ppo.data.prompts import prompt_column
from rlhf_ppo.data.sources import choose_split, load_splits
from rlhf_ppo.decoding import Decoded, Sampling, best_of_n, value_guided_search
from rlhf_ppo.models.loading import load_pretrained, load_value_model
from rlhf_ppo.terminal.text import print_text

# HfArgumentParser reads the annotations, so they are not postponed.


@dataclass
class GenerateArguments:
    """Options of `rlhf-ppo generate`.

    Raises:
        ValueError: A number is outside its range.
    """

    model: str = option("", "Directory or hub name of the policy.")
    critic: str = option("", "Directory or hub name of the critic, such as RUN/critic of a run with save_critic.")
    dataset_name: str = option("", "Prompts: a file, a directory or a hub name with `prompt`, `text` or `input_ids`.")
    split: str = option("train", "Split of the dataset.")
    num_prompts: AtLeastOne = option(256, "Number of prompts, from the first.")
    n: AtLeastOne = option(8, "Best of n: responses sampled for each prompt, of which the critic chooses one.")
    weighted: bool = option(False, "Best of n: add up the values of equal responses, and choose the heaviest.")
    width: AtLeastOne | None = option(
        None, "Value-guided search instead: blocks of tokens sampled for each prompt in a round."
    )
    block: AtLeastOne = option(8, "Value-guided search: tokens of a block.")
    max_new_tokens: AtLeastOne = option(128, "Maximum length of a response, in tokens.")
    temperature: Temperature = option(0.7, "Sampling temperature; use that of training.")
    top_k: Count = option(0, "Sample from the top_k most likely tokens. 0: from all.")
    top_p: PositiveShare = option(1.0, "Sample from the most likely tokens whose probabilities sum to top_p.")
    stop_token_id: Count | None = option(None, "Id of the token that ends a response; None: the tokenizer's EOS.")
    batch_size: AtLeastOne = option(64, "Rows in a batch.")
    seed: Seed = option(0, "Seed of the sampling.")
    trust_remote_code: bool = option(False, "Run Python code of a model's repository. Only for code you have read.")
    output: str = option("responses.jsonl", "File to write: one JSON object per prompt.")

    def __post_init__(self) -> None:
        """Check the numbers and the required options."""
        check_ranges(self, ranges_of(GenerateArguments))
        for name, what in {"model": "a policy", "critic": "its critic", "dataset_name": "prompts"}.items():
            if not getattr(self, name):
                raise ValueError(f"{name} is not given; give {what}")
        if self.weighted and self.width is not None:
            raise ValueError(f"weighted=True is for best of n, but width={self.width} searches; leave out one of them")


def generate(argv: Sequence[str] | None = None) -> Decoded:
    """Generate responses to prompts, chosen by a critic, and write them to a file.

    Args:
        argv: The options of `GenerateArguments`. None takes the program's own.

    Returns:
        The responses.

    Raises:
        SystemExit: An option, the data or a model is wrong; the message names it.
    """
    program = program_name("generate", argv)
    problems = Problems()
    parser: Any = PPOArgumentParser(GenerateArguments, prog=program)  # pyright: ignore[reportArgumentType]
    (options,) = parse(parser, argv, problems)
    problems.fail(program)
    with user_errors(program):
        prompts = _prompts(options)
        found = decode(options, prompts)
        rows = zip(prompts, found.texts, found.chosen, strict=True)
        lines = [json.dumps({**prompt, "response": text, "value": best.value}) for prompt, text, best in rows]
        write_text(Path(options.output), "\n".join(lines) + "\n")
    print_text(
        f"{len(prompts)} responses are in {options.output}: {found.num_sampled_tokens} tokens sampled, "
        f"{found.num_valued_rows} rows read by the critic. To judge them: rlhf-ppo judge "
        f"--dataset_name {options.output} --model_column response ..."
    )
    return found


def _prompts(options: GenerateArguments) -> list[dict[str, Any]]:
    """Return the first prompts of the data set: rows with `prompt`, or with `input_ids` and what describes them."""
    rows = choose_split(load_splits(options.dataset_name), options.split, "split")
    rows = rows.select(range(min(options.num_prompts, len(rows))))
    column = prompt_column(rows.column_names, "dataset_name")
    if column != "input_ids":
        return [{"prompt": prompt} for prompt in rows[column]]
    kept = {"input_ids", "attention_mask", "prompt"}.intersection(rows.column_names)
    return list(rows.select_columns(sorted(kept)))


def decode(options: GenerateArguments, prompts: Sequence[dict[str, Any]]) -> Decoded:
    """Load policy and critic, and choose a response to each prompt."""
    settings = {"trust_remote_code": options.trust_remote_code}
    tokenizer = load_tokenizer(options.model, options.trust_remote_code, "model")
    device = PartialState().device
    policy: Any = load_pretrained(AutoModelForCausalLM, options.model, "model", dtype="auto", **settings)
    critic = load_value_model(options.critic, "critic", **settings)
    how = Sampling(
        options.max_new_tokens, options.temperature, options.top_k, options.top_p, options.stop_token_id,
        options.batch_size,
    )  # fmt: skip
    set_seed(options.seed)
    policy, critic = policy.to(device), critic.to(device)
    if options.width is not None:
        return value_guided_search(policy, critic, tokenizer, prompts, options.width, options.block, how)
    return best_of_n(policy, critic, tokenizer, prompts, options.n, how, weighted=options.weighted)
