"""The command `rlhf-ppo critic`: audit the critic of a run, or train one on the kept completions of runs."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, set_seed
from trl.scripts.utils import ScriptArguments
from trl.trainer.model_config import ModelConfig
from trl.trainer.utils import get_peft_config

from rlhf_ppo.algorithm.advantages import gae
from rlhf_ppo.algorithm.losses import explained_variance, hl_gauss_value_loss
from rlhf_ppo.checkpoints.run import parse_resume
from rlhf_ppo.cli.arguments import check_single_process, prepare_trackers
from rlhf_ppo.cli.checks import parse, train_and_eval_rows
from rlhf_ppo.cli.errors import CommandParser, Problems, program_name, user_errors
from rlhf_ppo.cli.training import (
    DefaultBf16,
    check_model,
    load_tokenizer,
    loading_settings,
    resumed_checkpoint,
    running,
)
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.inherited import INHERITED_RANGES, check_inherited
from rlhf_ppo.config.validation import PositiveShare, Share, check_ranges, option, ranges_of
from rlhf_ppo.data.prompts import left_padded
from rlhf_ppo.evaluation.critic_audit import CriticAudit, Estimate
from rlhf_ppo.models.adapters import add_value_adapter, is_adapter_directory
from rlhf_ppo.models.heads import ValueHead, of_own_heads, value_head_of
from rlhf_ppo.models.loading import load_value_model
from rlhf_ppo.models.packing import pack_rows
from rlhf_ppo.models.policy_and_value import response_values
from rlhf_ppo.models.reference import asks_for_reference
from rlhf_ppo.models.unwrapping import is_peft_model, transformers_model
from rlhf_ppo.reporting.completion_files import COMPLETIONS_DIR, find_completions, read_completions
from rlhf_ppo.reporting.run_log import AUDIT_NAME, SETTINGS_NAME, RunSettings, has_log, training_log
from rlhf_ppo.terminal.console import hide_logs, hide_model_bars, use_console
from rlhf_ppo.terminal.text import print_text
from rlhf_ppo.trainer import PPOTrainer
from rlhf_ppo.training.checks import check_output_dir
from rlhf_ppo.training.saving import CRITIC_DIR

# ---- Audit ----


def critic(argv: Sequence[str] | None = None) -> CriticAudit:
    """Audit the critic of a run: `rlhf-ppo critic RUN`.

    Args:
        argv: A run's directory and options, see `audit_parser`. None takes the program's own.

    Returns:
        The audit.

    Raises:
        SystemExit: An option, a file or a model is wrong; the message names it.
    """
    program = program_name("critic", argv)
    options = audit_parser(program).parse_args(argv)
    with user_errors(program):
        found = audited_run(options).audit_critic(
            num_prefixes=options.num_prefixes, num_continuations=options.num_continuations
        )
    show_audit(found)
    print_text(f"The audit is in {os.path.join(options.run, AUDIT_NAME)}.")
    return found


def audit_parser(program: str) -> CommandParser:
    """Return the parser of the audit's options.

    Args:
        program: Start of error messages.
    """
    parser = CommandParser(
        program,
        description="Compare the critic of a finished run with Monte Carlo returns on held-out prompts. "
        "`rlhf-ppo critic train --help` shows how to train a critic on kept completions.",
    )
    parser.add_argument("run", metavar="RUN", help="Output directory of a run with save_critic.")
    parser.add_argument("--dataset_name", help="Prompts: a file, a directory or a hub name; by default the run's.")
    parser.add_argument("--dataset_config", help="Configuration of the data set, if it has several.")
    parser.add_argument(
        "--dataset_test_split", default="test", help="Split with the held-out prompts; without it, the last rows."
    )
    parser.add_argument("--num_prompts", type=int, default=200, help="Held-out prompts at most, from the first.")
    parser.add_argument("--num_prefixes", type=int, default=4, help="Beginnings of each response.")
    parser.add_argument("--num_continuations", type=int, default=16, help="Continuations of each beginning.")
    parser.add_argument(
        "--reward_funcs", nargs="+", help="The run's reward functions, if it was given them as Python objects."
    )
    parser.add_argument("--ref_model", help="Reference of the KL penalty; by default the run's.")
    parser.add_argument("--batch_size", type=int, help="Rows in a batch; by default the run's for evaluation.")
    parser.add_argument("--trust_remote_code", action="store_true", help="Run Python code of a model's repository.")
    return parser


_OF_DEVICE = ("bf16", "fp16", "use_cpu", "seed", "per_device_eval_batch_size")
"""Arguments of TrainingArguments that an audit takes from the run; it takes PPO's own except `_OF_TRAINING`."""

_OF_TRAINING = frozenset(
    (
        "preset exp_name overwrite_output_dir sft_model_path reward_model_path model_adapter_name ref_adapter_name "
        "share_base_model total_episodes num_mini_batches num_generations num_sample_generations hub_files "
        "num_completions_to_keep max_tokens_per_micro_batch critic_audit_steps critic_warmup_steps "
        "critic_warmup_explained_variance critic_freeze kl_target kl_horizon kl_stop ptx_coef warmup_ratio "
        "health_judge"
    ).split()
)

_MOVING = ("score_scaling", "score_normalization", "reference_ema")
"""Options whose state only checkpoints hold."""


def audited_run(options: Any) -> PPOTrainer:
    """Load policy, critic and rewards of a finished run into a trainer that can audit.

    Args:
        options: Those of `audit_parser`.

    Raises:
        OSError, ValueError: The run, its critic, its rewards or the prompts are missing or wrong.
    """
    run, trust = options.run, options.trust_remote_code
    settings, directory = RunSettings.load(run), os.path.join(run, CRITIC_DIR)
    if not settings.arguments:
        raise ValueError(f"{run} is not the output directory of a run: it has no {SETTINGS_NAME}")
    if not os.path.isdir(directory):
        raise ValueError(f"{run} has no {CRITIC_DIR}/: train with save_critic=True, which saves the critic")
    args = audit_arguments(settings.arguments, run, options.batch_size)
    models, functions = reward_sources(settings.made_of, options.reward_funcs)
    made_of = settings.made_of
    reference = options.ref_model or made_of.get("reference", made_of.get("policy"))
    is_own = bool(options.ref_model) or "reference" in made_of or not is_adapter_directory(run)
    is_whole = asks_for_reference(args) and is_own
    if is_whole and reference is None:
        raise ValueError(f"ref_model=None: {run} does not say from which model its KL is, so give ref_model")
    rows = held_out_rows(options, settings.made_of.get("dataset"))
    tokenizer = load_tokenizer(run, trust, "run")
    with hide_logs("rlhf_ppo.training.checks"):  # what is odd in learning was said in training
        return PPOTrainer(
            args,
            tokenizer,
            run,
            reference if is_whole else None,
            models or None,
            train_dataset=rows,
            value_model=directory,
            eval_dataset=rows,
            reward_funcs=functions or None,
        )


def audit_arguments(recorded: Mapping[str, Any], run: str, batch_size: int | None) -> PPOConfig:
    """Return the arguments of a run that decide what its responses, returns and values are.

    Args:
        recorded: All arguments of the run, as JSON values.
        run: Its directory.
        batch_size: Rows in a batch; None for the run's.

    Raises:
        ValueError: Its rewards or its reference depend on a state that the directory does not hold.
    """
    if moving := [name for name in _MOVING if recorded.get(name)]:
        raise ValueError(
            f"{moving[0]}={recorded[moving[0]]} of {run}: the unit of its returns moved with training and was not "
            "kept; audit during training, with critic_audit_steps"
        )
    inherited = {each.name for each in fields(TrainingArguments)} - {*_OF_DEVICE}
    own = [each for each in fields(PPOConfig) if each.name not in inherited | _OF_TRAINING and each.name in recorded]
    chosen: dict[str, Any] = {
        each.name: recorded[each.name]
        for each in own
        if recorded[each.name] != (None if each.default is MISSING else each.default)
        and not str(each.metadata.get("help", "")).startswith("Derived")
    }
    logs = training_log(run) if has_log(run) else []
    if coefficients := [entry["objective/kl_coef"] for entry in logs if "objective/kl_coef" in entry]:
        chosen["kl_coef"] = coefficients[-1]
    if batch_size is not None:
        chosen["per_device_eval_batch_size"] = batch_size
    rows = chosen.get("critic_ensemble", 1)  # one for each head
    chosen |= {"per_device_train_batch_size": rows, "max_steps": 1, "num_sample_generations": 0}
    chosen |= {"output_dir": run, "report_to": "none", "health_checks": False, "log_console": "none"}
    return PPOConfig(**chosen)


def reward_sources(made_of: Mapping[str, Any], given: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return the paths of a run's reward models, and the names of its reward functions.

    Args:
        made_of: Of `RunSettings`.
        given: Reward functions given for the audit, instead of the run's.

    Raises:
        ValueError: The run was given functions without a name, or another number of them.
    """
    rewards, functions = made_of.get("rewards", []), made_of.get("reward_funcs", given or [])
    models = rewards[: len(rewards) - len(functions)]
    chosen = functions if given is None else given
    if None in chosen or len(chosen) != len(functions):
        raise ValueError(
            f"reward_funcs={given!r}: the run had the reward functions {', '.join(rewards[len(models) :])}; give all "
            "of them, such as rewards.py:score"
        )
    return models, list(chosen)


def held_out_rows(options: Any, recorded: str | None) -> Any:
    """Return the held-out prompts: the run's, or those of another data set.

    Args:
        options: Those of `audit_parser`.
        recorded: The run's data set, if known.

    Raises:
        ValueError: There are none.
    """
    if options.num_prompts < 1:
        raise ValueError(f"num_prompts={options.num_prompts} must be at least 1")
    name = options.dataset_name or recorded
    if name is None:
        raise ValueError("dataset_name=None: the run does not say which prompts it had, so give dataset_name")
    given = ScriptArguments(name, options.dataset_config, dataset_test_split=options.dataset_test_split)
    _, rows = train_and_eval_rows(given, always_evaluates=True)  # pyright: ignore[reportArgumentType]
    if rows is None or not hasattr(rows, "select"):
        raise ValueError(f"dataset_name={name!r} has no held-out prompts; give another file, or dataset_test_split")
    return rows.select(range(min(options.num_prompts, len(rows))))


_SHOWN = {
    "explained_variance": "explained variance",
    "explained_variance_of_prompt": "  of the prompt's mean",
    "explained_variance_of_position": "  of the position",
    "explained_variance_of_both": "  of both",
    "gain_over_both": "  gain over both",
    "tau": "Kendall's tau",
    "tau_of_score": "  of the beginning's own score",
    "tau_of_position": "  of the position",
    "tau_ceiling": "  ceiling",
    "slope": "slope",
    "bias": "bias",
}


def show_audit(found: CriticAudit) -> None:
    """Print the figures of an audit as a table, and its findings."""
    table = Table("figure", "value", "95% interval")
    for name, title in _SHOWN.items():
        value, low, high = Estimate(*found.figures[name])
        interval = f"{low:.3g} to {high:.3g}" if math.isfinite(low) else ""
        table.add_row(title, f"{value:.3g}", interval)
    Console().print(table)
    sizes = f"{found.num_prefixes} beginnings, {found.num_prompts} prompts, {found.num_continuations} continuations"
    print_text(f"{sizes}. {' '.join(found.findings) or 'No defect found.'}")


# ---- Training on completions ----

Example = dict[str, Any]
"""`number`, `prompt_id`, `token_id`, and for each response token `token_written` and `returns` (0 for others)."""


def examples_of(directories: Sequence[str | Path], gamma: float = 1.0, lam: float = 0.95) -> list[Example]:
    """Read the kept completions of runs, with the return of each token.

    Args:
        directories: Output directories of runs with `num_completions_to_keep`, or their `completions` directories.
        gamma: Discount per token, that of the runs.
        lam: Lambda of the returns. Below 1 they build on the values that the runs' own critics gave (`token_value`);
            1 sums up rewards alone.

    Returns:
        An example for each completion with a score, in the order of runs and updates.

    Raises:
        ValueError: A directory holds no completions, a file is damaged, or values and rewards differ in their unit.
    """
    examples: list[Example] = []
    for directory in directories:
        path = Path(directory)
        run = path.parent if path.name == COMPLETIONS_DIR else path
        files = find_completions(run)
        if lam < 1 and RunSettings.load(run).arguments.get("whiten_rewards"):
            raise ValueError(
                f"lam={lam:g}: the critic of {str(run)!r} learned in the unit of each batch (whiten_rewards=True), "
                "which its rewards do not have; use lam=1"
            )
        if not files:
            raise ValueError(f"completions={str(directory)!r} holds none; train with num_completions_to_keep")
        rows = (row for file in files.values() for row in read_completions(file))
        examples += [_example(row, gamma, lam) for row in rows if row["score"] is not None]
    return [{"number": number} | each for number, each in enumerate(examples)]


def _example(row: Mapping[str, Any], gamma: float, lam: float) -> Example:
    written = torch.tensor([row["token_written"]])
    columns = (row["token_reward"], row["token_value"])
    rewards, values = (torch.tensor([[value or 0.0 for value in column]]) for column in columns)
    returns = gae(rewards, values, written, gamma, lam)[1][0].tolist()
    return {name: row[name] for name in ("prompt_id", "token_id", "token_written")} | {"returns": returns}


def collate(examples: Iterable[Example]) -> dict[str, Tensor]:
    """Pad examples: prompts on the left, responses on the right.

    Returns:
        `query_responses`, long `(B, C + T)`; `attention_mask`, bool `(B, C + T)`; `response_mask`, bool, and
        `returns`, float32, `(B, T)`; `numbers`, long `(B,)`.
    """
    rows = list(examples)
    width = max(len(row["token_id"]) for row in rows)

    def padded(name: str, filling: Any) -> Tensor:
        return torch.tensor([[*row[name], *[filling] * (width - len(row[name]))] for row in rows])

    prompts = [row["prompt_id"] for row in rows]
    real = torch.arange(width) < torch.tensor([[len(row["token_id"])] for row in rows])
    return {
        "query_responses": torch.cat((left_padded(prompts, 0), padded("token_id", 0)), dim=1),
        "attention_mask": torch.cat((left_padded([[1] * len(each) for each in prompts], 0).bool(), real), dim=1),
        "response_mask": padded("token_written", False),
        "returns": padded("returns", 0.0),
        "numbers": torch.tensor([row["number"] for row in rows]),
    }


class CriticTrainer(Trainer):
    """Fit a value model to returns: the mean over tokens of `0.5 (V - R)^2`, or of HL-Gauss for a head with bins.

    Several heads take turns over the examples, as over the responses of a run.

    Args:
        model: A value model over the policy's tokens. A head with bins keeps its range.
        args: The arguments.
        train_dataset: Examples of `examples_of`.
        eval_dataset: Held-out examples, or None.

    Raises:
        ValueError: There are several processes.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        train_dataset: Sequence[Example],
        eval_dataset: Sequence[Example] | None = None,
        **kwargs: Any,
    ) -> None:
        check_single_process("a critic is fitted")
        args.remove_unused_columns, args.label_names, args.prediction_loss_only = False, ["returns"], True
        pack_rows(model)
        data: dict[str, Any] = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        super().__init__(model, args, data_collator=collate, **data, **kwargs)  # pyright: ignore[reportArgumentType]

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch, a scalar in the reward's unit squared, or nats."""
        batch = (inputs["query_responses"], inputs["attention_mask"], inputs["response_mask"])
        (values, _, logits, of_heads), mask = response_values(model, *batch), inputs["response_mask"]
        learned = values
        if of_heads is not None:
            own = inputs["numbers"] % of_heads.shape[-1]
            learned, logits = of_own_heads(of_heads, own), None if logits is None else of_own_heads(logits, own)
        if logits is None:
            losses = 0.5 * (learned - inputs["returns"]).square()
        else:
            centers = value_head_of(model).centers_on(logits.device)
            losses = hl_gauss_value_loss(logits, inputs["returns"], centers).loss
        loss = losses[mask].mean()
        return (loss, {"values": values}) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        model: Any = self.accelerator.unwrap_model(self.model)
        if is_peft_model(model) and value_head_of(model) != ValueHead():  # an adapter does not name its head
            transformers_model(model).config.save_pretrained(str(output_dir or self.args.output_dir))

    @torch.no_grad()
    def explained_variance(self) -> float:
        """Return the share of the held-out returns' variance that the values explain; see `explained_variance`."""
        found = []
        self.model.eval()  # pyright: ignore[reportOptionalMemberAccess]
        for inputs in self.get_eval_dataloader():
            _, outputs = self.compute_loss(self.model, self._prepare_inputs(inputs), return_outputs=True)
            mask = inputs["response_mask"]
            found.append(torch.stack([outputs["values"][mask].float(), inputs["returns"][mask]]))
        values, returns = torch.cat(found, dim=1)
        return float(explained_variance(values, returns, torch.ones_like(values, dtype=torch.bool)))


@dataclass
class CriticScriptArguments:
    """Options of `rlhf-ppo critic train` besides those of `TrainingArguments` and `ModelConfig`."""

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
    """`TrainingArguments` that keep the epoch with the lowest loss on held-out completions."""

    eval_strategy: str = option("epoch", "When the held-out loss is measured: 'epoch', 'steps' or 'no'.")
    save_strategy: str = option("best", "When a checkpoint is saved; 'no': keep the last epoch, not the best.")
    save_total_limit: int | None = option(1, "Checkpoints kept.")
    save_only_model: bool = option(True, "Save checkpoints without the optimizer's state.")
    load_best_model_at_end: bool = option(True, "Save the weights with the lowest held-out loss, not the last ones.")
    metric_for_best_model: str | None = option("eval_loss", "Metric by which the weights are chosen.")

    def __post_init__(self) -> None:
        """Keep the last weights if nothing is measured or saved in between; refuse what a critic's loss cannot use."""
        if self.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor:g}: a critic learns returns, which are "
                "no labels; leave it out"
            )
        if "no" in (self.eval_strategy, self.save_strategy):
            self.load_best_model_at_end = False
        super().__post_init__()


def train_critic(argv: Sequence[str] | None = None) -> CriticTrainer:
    """Train a value model on the kept completions of runs: `rlhf-ppo critic train`.

    Args:
        argv: The options: those of `CriticScriptArguments`, `TrainingArguments` and TRL's `ModelConfig`, or a YAML
            file with them after `--config`. None takes the program's own.

    Returns:
        The trainer, after training and saving.

    Raises:
        SystemExit: An option, the completions or the model is wrong; the message names it.
    """
    program, problems = program_name("critic train", argv), Problems()
    groups = (CriticScriptArguments, CriticArguments, ModelConfig)
    script_args, args, model_args = parse(groups, program, argv, problems)
    problems.fail(program)
    with user_errors(program):
        check_ranges(script_args, ranges_of(CriticScriptArguments))
        check_ranges(args, INHERITED_RANGES)
        check_inherited(args)
        prepare_trackers(args)
        check_output_dir(args.output_dir)
        if args.save_only_model and parse_resume(args.resume_from_checkpoint):
            raise ValueError(
                f"resume_from_checkpoint={args.resume_from_checkpoint!r} needs the optimizer's state, which "
                "save_only_model=True leaves out of checkpoints; set save_only_model=False in both runs"
            )
        checkpoint = resumed_checkpoint(args)
        trainer = critic_trainer(script_args, args, model_args)
    with running(program, trainer), hide_model_bars():
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(args.output_dir)
        trainer.save_state()
        held_out = trainer.explained_variance()
    print_text(
        f"The critic is in {args.output_dir}. It explains {held_out:.3g} of the variance of held-out returns (1: all "
        "of it, below 0: less than their mean). Start a run from it with --value_model_path, or use it with "
        "rlhf_ppo.decoding."
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
    settings = loading_settings(script_args.trust_remote_code, model_args)
    model = load_value_model(path, "value_model", **settings)
    if (peft_config := get_peft_config(model_args)) is not None:
        model = add_value_adapter(model, peft_config)
    tokenizer = load_tokenizer(path, script_args.trust_remote_code, "model_name_or_path")
    trainer = CriticTrainer(model, args, train, test, processing_class=tokenizer)
    use_console(trainer, "line")
    return trainer
