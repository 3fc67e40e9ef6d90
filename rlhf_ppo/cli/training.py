"""Trainers of SFT, reward model and PPO from the arguments of a command line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from datasets import Dataset
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    dynamic_module_utils,
    set_seed,
)
from transformers.trainer_utils import has_length
from trl.trainer.model_config import ModelConfig
from trl.trainer.reward_config import RewardConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.utils import get_peft_config

from rlhf_ppo.checkpoints.complete import newest_trl_checkpoint, start_checkpoint
from rlhf_ppo.checkpoints.files import DiskFullError, explaining_full_disk, remove_links
from rlhf_ppo.checkpoints.run import check_start, locked, no_checkpoint, parse_resume
from rlhf_ppo.cli.arguments import PPOScriptArguments, check_columns, prepare_trackers, quantization_options
from rlhf_ppo.cli.errors import fail, user_errors, wants_tracebacks
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.arguments import logging_interval
from rlhf_ppo.config.inherited import resolved_bf16
from rlhf_ppo.config.validation import ExplainsUnknown, parse_template_kwargs
from rlhf_ppo.data.sources import choose_split, hold_out_pairs, load_splits
from rlhf_ppo.models.adapters import adapter_config, is_adapter_directory
from rlhf_ppo.models.loading import CODE_IS_RUN_IF, load_classifier, load_pretrained, load_value_model, wants_code
from rlhf_ppo.models.reference import asks_for_reference
from rlhf_ppo.models.unwrapping import drop_ignored_generation_settings
from rlhf_ppo.processes.distributed import raise_on_all_ranks
from rlhf_ppo.processes.signals import RunStopped, StopOnSignal, say
from rlhf_ppo.reporting.console import use_console
from rlhf_ppo.reporting.judgements import ACCURACY, RewardAccuracy
from rlhf_ppo.reporting.metrics import note_on_memory
from rlhf_ppo.reporting.run_log import RunSettings, where_results_are
from rlhf_ppo.rewards.resolve import resolve_environments, resolve_tools
from rlhf_ppo.rewards.scorer import WrongRewardError
from rlhf_ppo.terminal import (
    RedactsSecrets,
    print_text,
    redacted,
    visible_logger,
)
from rlhf_ppo.trainer import PPOTrainer
from rlhf_ppo.training.guards import DivergenceError
from rlhf_ppo.training.publishing import upload_directory


class DefaultBf16(ExplainsUnknown, RedactsSecrets):
    """Base of TRL's configurations with the default of `bf16` of `PPOConfig`: on if the device supports it."""

    def __post_init__(self) -> None:
        """Set `bf16`, which TRL switches on everywhere, or check it."""
        args: Any = self
        args.bf16 = resolved_bf16(args)
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]
        args.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"  # torch warns otherwise


@dataclass(repr=False)
class SFTArguments(DefaultBf16, SFTConfig):
    """TRL's `SFTConfig` with the `bf16` of `PPOConfig`."""


@dataclass(repr=False)
class RewardArguments(DefaultBf16, RewardConfig):
    """TRL's `RewardConfig` with the `bf16` of `PPOConfig`."""


# ---- TRL's trainers: checkpoint at a signal, resume from the newest complete one ----


def resumed_checkpoint(args: Any) -> str | None:
    """Return the checkpoint from which training continues, None for a new run.

    `resume_from_checkpoint=True` chooses the newest complete checkpoint; Trainer would also choose an incomplete one.

    Raises:
        ValueError: There is no such checkpoint, or no complete one.
    """
    wanted = parse_resume(args.resume_from_checkpoint)
    if wanted is False:
        return None
    check_start(args.output_dir, wanted, overwrite=False)
    checkpoint = newest_trl_checkpoint(args.output_dir) if wanted is True else wanted
    if checkpoint is None:
        raise no_checkpoint(args.output_dir)
    return str(checkpoint)


@contextmanager
def ending_with_checkpoint(trainer: Trainer) -> Iterator[None]:
    """End training with a checkpoint after a signal, and report a full disk; a final save is completed first.

    The output directory is locked in the block. A checkpoint is written into a new directory, in which nobody has
    planted a link.

    Args:
        trainer: One of TRL's.

    Raises:
        DiskFullError: There was no room for a checkpoint or the model.
        InUseError: Another run uses the output directory.
        RunStopped: A signal has ended training.
    """
    signals, save = _EndsTraining(trainer), trainer._save_checkpoint
    trainer.add_callback(signals)
    directory = str(trainer.args.output_dir)

    def save_anew(model: Any, trial: Any) -> None:
        if trainer.args.should_save:
            start_checkpoint(os.path.join(directory, f"checkpoint-{trainer.state.global_step}"))
            remove_links(directory)  # TRL writes a model card here with each checkpoint
        trainer.accelerator.wait_for_everyone()
        save(model, trial)

    def newest() -> str | None:
        found = newest_trl_checkpoint(directory)
        return None if found is None else str(found)

    trainer._save_checkpoint = save_anew
    try:
        with ExitStack() as stack:
            with raise_on_all_ranks(trainer.accelerator):
                if trainer.is_world_process_zero():
                    os.makedirs(directory, exist_ok=True)
                    stack.enter_context(locked(directory))
            with signals.listening(), explaining_full_disk(directory, newest):
                yield
    finally:
        trainer.remove_callback(signals)
        trainer._save_checkpoint = save


class _EndsTraining(StopOnSignal):
    """Ends Trainer's own loop as soon as the checkpoint that a signal asks for is written."""

    def __init__(self, trainer: Trainer) -> None:
        accelerator = trainer.accelerator
        super().__init__(lambda flags: accelerator.reduce(flags, "sum"), accelerator.num_processes)  # pyright: ignore[reportArgumentType]
        self.trainer = trainer

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Ask again for the checkpoint, which `save_strategy="best"` writes only after a best evaluation."""
        if self.stopped is not None:
            control.should_evaluate, control.should_save = False, True

    def on_save(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Leave before Trainer ends its loop, where it may delete this checkpoint."""
        if self.stopped is not None:
            self._end(self.stopped)

    def _end(self, number: int) -> NoReturn:
        trainer = self.trainer
        trainer.accelerator.wait_for_everyone()  # every rank's files are there
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        trainer._finish_current_push()
        trainer.is_in_train = False
        done, of = trainer.state.global_step, trainer.state.max_steps
        checkpoint = os.path.join(str(trainer.args.output_dir), f"checkpoint-{done}")
        if trainer.is_world_process_zero():
            say(
                f"{signal.Signals(number).name}: the run has ended after step {done} of {of}, with the checkpoint "
                f"{checkpoint}; continue with resume_from_checkpoint=True (--resume_from_checkpoint True)."
            )
        raise RunStopped(number, checkpoint)


# ---- Making the trainers ----

dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # an error instead of a question on stdin about a model's code

logger = visible_logger(__name__)


def ppo_trainer(
    script_args: PPOScriptArguments,
    args: PPOConfig,
    model_args: ModelConfig,
    train_dataset: Any,
    eval_dataset: Any,
    *,
    reward_model: Any = None,
    value_model: Any = None,
    ref_model: str | None = None,
    reward_funcs: Any = None,
    **agents: Any,
) -> PPOTrainer:
    """Load the tokenizer, the policy and the reference, and make the trainer.

    Args:
        script_args: Gives `trust_remote_code` and `ptx_dataset`.
        args: Gives `sft_model_path`, the policy at its start.
        model_args: How models are loaded, and the policy's adapter.
        train_dataset: The prompts.
        eval_dataset: The prompts for evaluation, or None.
        reward_model: As `PPOTrainer` takes it.
        value_model: As `PPOTrainer` takes it.
        ref_model: Path of the reference; None compares with the policy as it starts.
        reward_funcs: As `PPOTrainer` takes them.
        **agents: `tools` and `environment_factory`, as `PPOTrainer` takes them.
    """
    prepare_trackers(args)
    settings = loading_settings(script_args.trust_remote_code, model_args)
    peft_config = get_peft_config(model_args)
    ref_argument = "sft_model_path" if ref_model is None else "ref_model"
    is_whole = peft_config is None and not is_adapter_directory(args.sft_model_path)
    if ref_model is None and asks_for_reference(args) and is_whole:
        ref_model = args.sft_model_path
    texts = script_args.ptx_dataset
    if texts is not None:
        texts = choose_split(load_splits(texts, argument="ptx_dataset"), "train", "the split of ptx_dataset")
    model = load_pretrained(AutoModelForCausalLM, args.sft_model_path, "sft_model_path", **settings)
    return PPOTrainer(
        args,
        policy_tokenizer(script_args, args, model_args),
        model=model,
        ref_model=ref_model and load_pretrained(AutoModelForCausalLM, ref_model, ref_argument, **settings),
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config,
        reward_funcs=reward_funcs,
        ptx_dataset=texts,
        **agents,
    )


def scored_ppo_trainer(
    script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig, train_dataset: Any, eval_dataset: Any
) -> PPOTrainer:
    """Make the trainer with the reward model and the reward functions that the options name.

    Args:
        script_args: Gives `reward_funcs` and `value_model_path`.
        args: Gives `reward_model_path`.
        model_args: How models are loaded, and the policy's adapter.
        train_dataset: The prompts.
        eval_dataset: The prompts for evaluation, or None.
    """
    scorers = load_scorers(script_args, args, model_args) if has_reward_model(script_args, args) else {}
    if script_args.value_model_path is not None:
        scorers["value_model"] = load_critic(script_args.value_model_path, script_args, args, model_args)
    data = (train_dataset, eval_dataset)
    agents = {
        "tools": resolve_tools(script_args.tools),
        "environment_factory": resolve_environments(script_args.environment),
    }
    functions = script_args.reward_funcs
    return ppo_trainer(script_args, args, model_args, *data, reward_funcs=functions, **scorers, **agents)


def has_reward_model(script_args: PPOScriptArguments, args: PPOConfig) -> bool:
    """Return whether a reward model scores: without reward functions and environments, or if its path is given."""
    default = PPOConfig.__dataclass_fields__["reward_model_path"].default
    return not (script_args.reward_funcs or script_args.environment) or args.reward_model_path != default


def load_scorers(script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig) -> dict[str, Any]:
    """Load the reward model, and a separate value model if the loaded reward model cannot become it.

    Returns:
        Arguments of `ppo_trainer`.
    """
    if args.share_base_model and is_adapter_directory(args.reward_model_path):
        return {"reward_model": args.reward_model_path}  # the trainer puts it over the policy's base
    settings = loading_settings(script_args.trust_remote_code, model_args)
    path, argument, load = args.reward_model_path, "reward_model_path", load_classifier
    if path == args.sft_model_path:
        logger.warning_once(
            f"{argument}={path!r} is the policy, as in TRL's example: its score head is random unless it has one, and "
            "so are the scores"
        )
        load = partial(load_pretrained, AutoModelForSequenceClassification)
    models = {"reward_model": load(path, argument, num_labels=1, **settings)}
    changes = settings["dtype"] != torch.float32 or "quantization_config" in settings
    if script_args.value_model_path is None and changes and not args.share_base_model:
        models["value_model"] = load_pretrained(
            AutoModelForSequenceClassification, path, argument, num_labels=1, **whole_in_float32(settings)
        )
    return models


def load_critic(path: str, script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig) -> Any:
    """Load the value model, or return its path if the trainer puts it over the policy's base (`share_base_model`)."""
    if args.share_base_model:
        return path
    settings = loading_settings(script_args.trust_remote_code, model_args)
    return load_value_model(path, "value_model_path", **whole_in_float32(settings))


def whole_in_float32(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a value model, all weights of which are trained: in 32 bits, not quantized."""
    kept = {name: settings[name] for name in ("revision", "attn_implementation", "trust_remote_code")}
    return kept | {"dtype": torch.float32}


def reward_trainer(args: RewardConfig, model_args: ModelConfig, train_dataset: Any, eval_dataset: Any) -> Trainer:
    """Make TRL's trainer of a reward model from preference pairs.

    Args:
        args: The arguments.
        model_args: The model, which gets a scalar head, and its adapter.
        train_dataset: Rows with `chosen` and `rejected`, and `prompt` unless both begin with it.
        eval_dataset: Rows for evaluation, or None.
    """
    from trl.trainer.reward_trainer import RewardTrainer

    return _trl_trainer(RewardTrainer, "reward", args, model_args, train_dataset, eval_dataset)


def measured_reward_trainer(
    args: RewardConfig, model_args: ModelConfig, train_dataset: Any, eval_dataset: Any
) -> Trainer:
    """Make the trainer of a reward model; without rows for evaluation, hold some out for its accuracy.

    They are drawn from the pairs that remain after TRL has left out those longer than `max_length`.

    Args:
        args: As in `reward_trainer`.
        model_args: As in `reward_trainer`.
        train_dataset: As in `reward_trainer`; nothing is held out of a stream.
        eval_dataset: As in `reward_trainer`.

    Raises:
        ValueError: `eval_strategy` asks for evaluations, and too few pairs remain to hold one out.
    """
    if eval_dataset is not None or not isinstance(train_dataset, Dataset):
        return reward_trainer(args, model_args, train_dataset, eval_dataset)
    some = train_dataset.select(range(min(len(train_dataset), args.dataset_num_proc or 1)))  # replaced below
    trainer = reward_trainer(args, model_args, train_dataset, some)
    trainer.train_dataset, trainer.eval_dataset = hold_out_pairs(trainer.train_dataset)
    if trainer.eval_dataset is None and args.eval_strategy != "no":
        raise ValueError(
            f"eval_strategy={str(args.eval_strategy)!r}, but {len(trainer.train_dataset)} pairs within max_length="
            f"{args.max_length} are too few to hold one out; give more pairs, a split for evaluation, or "
            "eval_strategy='no'"
        )
    return trainer


def measure_accuracy(trainer: Trainer) -> RewardAccuracy | None:
    """Measure a reward model on held-out pairs, print its accuracy and write it beside the model.

    Without held-out pairs, the accuracy of an earlier model in the same directory is deleted.

    Args:
        trainer: The trainer of `measured_reward_trainer`, after training.

    Returns:
        The accuracy; None if there are no held-out pairs, or their number is not known.
    """
    pairs: Any = trainer.eval_dataset
    if not has_length(pairs) or len(pairs) == 0:
        if trainer.is_world_process_zero():
            Path(str(trainer.args.output_dir), ACCURACY).unlink(missing_ok=True)
        return None
    found = RewardAccuracy.of(trainer.evaluate()["eval_accuracy"], len(pairs))
    if trainer.is_world_process_zero():
        found.save(str(trainer.args.output_dir))
        print_text(f"The reward model is {found}.")
        if found.state is not None:
            logger.warning(f"The reward model is {found.state}. {found.advice}")
    return found


def sft_trainer(args: SFTConfig, model_args: ModelConfig, train_dataset: Any, eval_dataset: Any) -> Trainer:
    """Make TRL's trainer of a language model from texts.

    Args:
        args: The arguments.
        model_args: The model, and its adapter.
        train_dataset: Rows with a text, with `prompt` and `completion`, or with `messages`.
        eval_dataset: Rows for evaluation, or None.
    """
    from trl.trainer.sft_trainer import SFTTrainer

    return _trl_trainer(SFTTrainer, "sft", args, model_args, *map(_without_lone_prompt, (train_dataset, eval_dataset)))


def _trl_trainer(
    trainer_class: Any, command: str, args: Any, model_args: ModelConfig, train_dataset: Any, eval_dataset: Any
) -> Trainer:
    path = model_args.model_name_or_path
    if path is None:
        raise ValueError("model_name_or_path=None: give the directory or hub name of the model to train")
    check_model(path, "model_name_or_path", args.trust_remote_code)
    args.model_init_kwargs = loading_settings(args.trust_remote_code, model_args) | (args.model_init_kwargs or {})
    check_columns(train_dataset, text_columns(command, args))
    tokenizer = load_tokenizer(path, args.trust_remote_code, "model_name_or_path")
    peft_config = get_peft_config(model_args)
    try:
        set_seed(args.seed)  # determines a new head or adapter
        trainer = trainer_class(path, args, None, train_dataset, eval_dataset, tokenizer, peft_config=peft_config)
    except SafetensorError as error:
        raise ValueError(
            f"model_name_or_path={path!r} could not be loaded: its weights are damaged ({error})"
        ) from error
    drop_ignored_generation_settings(trainer.model)
    use_console(trainer, "line")
    trainer.add_callback(_LogsShortRuns())
    return trainer


def text_columns(command: str, args: Any) -> list[set[str]]:
    """Return the sets of columns from which `rlhf-ppo sft` or `rlhf-ppo reward` can learn.

    Args:
        command: "sft" or "reward".
        args: The arguments of TRL's trainer.
    """
    if command == "reward":
        return [{"chosen", "rejected"}]
    return [{args.dataset_text_field}, {"messages"}, {"prompt", "completion"}, {"input_ids"}]


class _LogsShortRuns(TrainerCallback):
    """Logs a short run 20 times, as PPO does, if `logging_steps` is the default."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the interval of the logs."""
        if args.logging_steps == 10:
            state.logging_steps = logging_interval(state.max_steps)


def _without_lone_prompt(dataset: Any) -> Any:
    """Remove a `prompt` without `completion`, which TRL would expect."""
    if dataset is None or dataset.column_names is None:
        return dataset
    is_lone = "prompt" in dataset.column_names and "completion" not in dataset.column_names
    return dataset.remove_columns("prompt") if is_lone else dataset


class _Begun(TrainerCallback):
    """Records that training has begun; later errors are not errors of the options."""

    begun = False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Record it."""
        self.begun = True


@contextmanager
def running(program: str, trainer: Trainer) -> Iterator[None]:
    """Turn external errors of a run into one sentence and exit code 2.

    These are: rejected options, a server without an answer, a full disk, too little memory, numbers that are not
    finite, a wrong result of a reward function, and Ctrl-C outside of PPO's training (which handles it). Other errors
    during training keep their traceback, also errors that a user's reward function raises.

    Args:
        program: Start of the sentence.
        trainer: The trainer.

    Raises:
        SystemExit: With code 2 after such an error, 130 after Ctrl-C.
    """
    callback = _Begun()
    trainer.add_callback(callback)
    try:
        yield
    except KeyboardInterrupt:
        say(f"{program}: ended by SIGINT; earlier output is in {trainer.args.output_dir}")
        raise SystemExit(130) from None
    except (ConnectionError, DiskFullError, DivergenceError, WrongRewardError) as error:
        if wants_tracebacks():
            raise
        print(file=sys.stderr)  # the progress bar leaves its line unfinished
        fail(program, str(error))
    except Exception as error:
        if (note := note_on_memory(error)) and not wants_tracebacks():
            print(file=sys.stderr)
            fail(program, f"{note} ({error})")
        if callback.begun:
            raise
        with user_errors(program):
            raise
    finally:
        trainer.remove_callback(callback)


def train_and_save(
    trainer: Trainer, dataset_name: str | None, *, merge: bool = False, show_samples: bool = False
) -> None:
    """Train, save the model with its tokenizer, log and card, upload it if requested, and print the directory.

    A signal ends TRL's trainers with a checkpoint, as in PPO.

    Args:
        trainer: The trainer.
        dataset_name: Name of the data set, for the model card.
        merge: Whether to replace a LoRA adapter by the merged model.
        show_samples: Whether a `PPOTrainer` shows a table of all samples at the end.
    """
    args: Any = trainer.args
    dataset_name = redacted(dataset_name)  # for model cards
    prepare_trackers(args)
    if isinstance(trainer, PPOTrainer):
        trainer.dataset_name = dataset_name
        checkpoint, ending = parse_resume(args.resume_from_checkpoint), nullcontext()
    else:
        checkpoint, ending = resumed_checkpoint(args), ending_with_checkpoint(trainer)
    with ending:
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.is_world_process_zero():
            remove_links(args.output_dir)
        trainer.save_model(args.output_dir, _internal_call=True)  # uploaded below, with its card
        trainer.save_state()
    cast(Any, trainer).create_model_card(dataset_name=dataset_name)
    _merge_and_upload(trainer, dataset_name, merge)
    if isinstance(trainer, PPOTrainer) and show_samples:
        trainer.generate_completions()
    if trainer.is_world_process_zero():
        is_policy = isinstance(trainer, PPOTrainer)
        print_text(
            where_results_are(args.output_dir, args.output_dir) if is_policy else f"The model is in {args.output_dir}."
        )


def _merge_and_upload(trainer: Trainer, dataset_name: str | None, merge: bool) -> None:
    args: Any = trainer.args
    adapter = os.path.join(args.output_dir, "adapter_config.json")
    trainer.accelerator.wait_for_everyone()
    if not (merge and os.path.isfile(adapter)):
        if args.push_to_hub:
            trainer.push_to_hub(dataset_name=dataset_name)
        return
    if trainer.accelerator.is_main_process:
        merge_adapter(args.output_dir, getattr(args, "trust_remote_code", False))
        if args.push_to_hub:
            upload_directory(args)
    trainer.accelerator.wait_for_everyone()


def merge_adapter(directory: str, trust_remote_code: bool = False) -> None:
    """Replace the adapter in a directory by its base with the adapter merged, in the base's precision.

    Args:
        directory: Output of `save_model`.
        trust_remote_code: Whether to run code of the base's repository.
    """
    from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification

    trust: Any = {"trust_remote_code": trust_remote_code}
    scores = adapter_config(directory).task_type == "SEQ_CLS"
    if scores:
        adapted = AutoPeftModelForSequenceClassification.from_pretrained(directory, num_labels=1, **trust)
    else:
        adapted = AutoPeftModelForCausalLM.from_pretrained(directory, **trust)
    merged: Any = adapted.merge_and_unload()
    drop_ignored_generation_settings(merged)
    merged.save_pretrained(directory)
    for name in ("adapter_config.json", "adapter_model.safetensors"):  # last: without them a failed save would lose it
        os.remove(os.path.join(directory, name))


def policy_tokenizer(
    script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig
) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer, from `model_name_or_path` if it is given."""
    path = model_args.model_name_or_path
    argument = "model_name_or_path" if path else "sft_model_path"
    return load_tokenizer(path or args.sft_model_path, script_args.trust_remote_code, argument)


def template_kwargs(model: str, given: str | None) -> dict[str, Any] | None:
    """Return further arguments of the chat template: those given, or else those that a run trained its policy with.

    Args:
        model: A directory, of a run or not, or a hub name.
        given: JSON, or None.
    """
    recorded = RunSettings.load(model).arguments.get("chat_template_kwargs") if given is None else given
    return parse_template_kwargs(recorded)


def load_tokenizer(path: str, trust_remote_code: bool, argument: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer that pads on the left; without a PAD token, EOS is its PAD.

    Args:
        path: A directory, or a hub name.
        trust_remote_code: Whether to run code of its repository.
        argument: The option that gave the path, for the error message.

    Raises:
        ValueError: There is no tokenizer, or its files are damaged.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError) as error:
        if wants_code(error):
            raise ValueError(f"{argument}={path!r} {CODE_IS_RUN_IF}") from error
        found = "is neither a directory with a tokenizer nor a model that the hub gave"
        found = f"has no tokenizer that can be read: {error}" if os.path.isdir(path) else found
        raise ValueError(f"{argument}={path!r} {found}; save one there with tokenizer.save_pretrained") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # a new token would be outside the models' vocabularies
    return tokenizer


def loading_settings(trust_remote_code: bool, model_args: ModelConfig) -> dict[str, Any]:
    """Return the keyword arguments of `from_pretrained`."""
    dtype = model_args.dtype
    return {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": trust_remote_code,
        "dtype": dtype if dtype in ("auto", None) else getattr(torch, dtype),
        **quantization_options(model_args),
    }


def check_model(path: str, argument: str, trust_remote_code: bool) -> None:
    """Check that a directory or the hub has a model's configuration, or an adapter's.

    Raises:
        ValueError: It has none.
    """
    if is_adapter_directory(path):
        return
    load_pretrained(AutoConfig, path, argument, trust_remote_code=trust_remote_code)
