"""The command `rlhf-ppo critic`: train a value model on the kept completions of runs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments, set_seed
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.cli.arguments import PPOArgumentParser
from rlhf_ppo.cli.checks import Problems, parse
from rlhf_ppo.cli.errors import fail, program_name, user_errors
from rlhf_ppo.cli.training import DefaultBf16, check_model, load_tokenizer, running
from rlhf_ppo.config.validation import PositiveShare, Share, check_ranges, option, ranges_of
from rlhf_ppo.models.loading import load_scalar_model
from rlhf_ppo.terminal.text import print_text
from rlhf_ppo.training.checks import check_output_dir
from rlhf_ppo.training.critic_fitting import CriticTrainer, examples_of

# TrlParser reads the annotations, so they are not postponed.


@dataclass
class CriticScriptArguments:
    """Options of `rlhf-ppo critic` besides those of `TrainingArguments` and `ModelConfig`."""

    completions: list[str] = field(
        default_factory=list, metadata={"help": "Output directories of runs with num_completions_to_keep."}
    )
    gamma: Share = option(1.0, "Discount per token, that of the runs.")
    lam: Share = option(
        0.95, "Lambda of the returns. Below 1 they build on the values of the runs' own critics; 1: rewards alone."
    )
    eval_share: PositiveShare = option(0.1, "Share of the prompts whose completions are held out.")
    trust_remote_code: bool = option(False, "Run Python code of a model's repository.")


@dataclass(repr=False)
class CriticArguments(DefaultBf16, TrainingArguments):
    """`TrainingArguments` with the `bf16` of `PPOConfig`."""


def critic(argv: Sequence[str] | None = None) -> CriticTrainer:
    """Train a value model on the kept completions of runs: `rlhf-ppo critic train`.

    Args:
        argv: "train" and the options: those of `CriticScriptArguments`, `TrainingArguments` and TRL's `ModelConfig`,
            or a YAML file with them after `--config`. None takes the program's own.

    Returns:
        The trainer, after training and saving.

    Raises:
        SystemExit: An option, the completions or the model is wrong; the message names it.
    """
    program = program_name("critic", argv)
    words = [*(sys.argv[1:] if argv is None else argv)]
    if words[:1] != ["train"] and not {"-h", "--help"} & {*words}:
        fail(
            program,
            f"{' '.join(words[:1]) or 'no word'!r} is not a task: write `rlhf-ppo critic train --completions RUN ...`",
        )
    groups: Any = (CriticScriptArguments, CriticArguments, ModelConfig)
    problems, options = Problems(), words[1:] if words[:1] == ["train"] else words
    script_args, args, model_args = parse(PPOArgumentParser(groups, prog=program), options, problems)
    problems.fail(program)
    with user_errors(program):
        check_ranges(script_args, ranges_of(CriticScriptArguments))
        check_output_dir(args.output_dir)
        trainer = critic_trainer(script_args, args, model_args)
    with running(program, trainer):
        trainer.train()
        trainer.save_model(args.output_dir)
        trainer.save_state()
        held_out = trainer.explained_variance()
    print_text(
        f"The critic is in {args.output_dir}. It explains {held_out:.3g} of the variance of held-out returns (1: all "
        "of it, 0: none). Use it as value_model, or with rlhf_ppo.decoding."
    )
    return trainer


def critic_trainer(
    script_args: CriticScriptArguments, args: CriticArguments, model_args: ModelConfig
) -> CriticTrainer:
    """Load model and completions, hold out the completions of some prompts, and make the trainer.

    Raises:
        ValueError: There is no model, or too few completions.
    """
    path = model_args.model_name_or_path
    if not script_args.completions or path is None:
        missing = "completions" if not script_args.completions else "model_name_or_path"
        raise ValueError(f"{missing}=None: give {'runs' if missing == 'completions' else 'the model to start from'}")
    check_model(path, "model_name_or_path", script_args.trust_remote_code)
    examples = examples_of(script_args.completions, script_args.gamma, script_args.lam)
    prompts = list(dict.fromkeys(tuple(each["prompt_id"]) for each in examples))
    num_held_out = round(script_args.eval_share * len(prompts))
    if not 0 < num_held_out < len(prompts):
        raise ValueError(
            f"completions={script_args.completions!r} hold {len(prompts)} prompts, and eval_share="
            f"{script_args.eval_share:g} holds out {num_held_out} of them: keep more completions, or change it"
        )
    held_out = set(prompts[-num_held_out:])
    train = [each for each in examples if tuple(each["prompt_id"]) not in held_out]
    test = [each for each in examples if tuple(each["prompt_id"]) in held_out]
    set_seed(args.seed)  # determines a new head
    model = load_scalar_model(path, "value_model", trust_remote_code=script_args.trust_remote_code)
    tokenizer = load_tokenizer(path, script_args.trust_remote_code, "model_name_or_path")
    return CriticTrainer(model, args, train, test, processing_class=tokenizer)
