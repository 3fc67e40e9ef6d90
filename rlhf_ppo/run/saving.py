"""Saving models, checkpoints, and resume from a checkpoint."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import NOT_OF_TRAINING, Sizes
from rlhf_ppo.generation.sampling import SpecialTokens, changed
from rlhf_ppo.models.adapters import (
    adapter_kind,
    adapter_settings,
    changed_settings,
    check_holds_adapter,
    load_adapter_weights,
    origin,
    save_adapter,
)
from rlhf_ppo.models.heads import ValueHead
from rlhf_ppo.models.loading import CHECKPOINT_DTYPE, CRITIC_DIR, check_start_elsewhere, remove_saved_models
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import is_peft_model, original_outputs, replaced, transformers_model
from rlhf_ppo.ranks.processes import get_logger, is_fsdp, raise_on_all_ranks, zero_stage
from rlhf_ppo.ranks.random_streams import preserve_rng
from rlhf_ppo.reporting.run_log import step_of_policy
from rlhf_ppo.run import checkpoints as directories
from rlhf_ppo.run.datasets import check_ranks_alike
from rlhf_ppo.run.optimization import Optimization
from rlhf_ppo.run.run_state import PPOTrainerState, Progress, RunState
from rlhf_ppo.terminal import is_secret, print_text

logger = get_logger(__name__)

VALUE_MODEL_DIR = "value_model"
"""Directory of the value model in a checkpoint."""


# ---- Models ----


def save_models(
    models: PolicyAndValue,
    directory: str,
    state_dict: Mapping[str, Tensor] | None,
    value_directory: str | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the models, or their adapters, in place of earlier ones, in the format of `from_pretrained`.

    Args:
        models: Both models.
        directory: The policy's directory.
        state_dict: Weights of both models, gathered by a backend; None takes them from the models.
        value_directory: The value model's subdirectory; None does not write it.
        dtype: Type of the policy's saved weights, unless it has an adapter; None: as they are.

    Raises:
        RuntimeError: A trained weight of an adapter would not be saved; nothing is written or removed.
    """
    parts = [("policy", models.policy, directory)]
    if value_directory is not None:
        parts.append(("value_model", models.value_model, os.path.join(directory, value_directory)))
    states = {name: None if state_dict is None else _with_prefix(state_dict, f"{name}.") for name, *_ in parts}
    for name, part, _ in parts:
        if is_peft_model(part) and (gathered := states[name]) is not None:
            check_holds_adapter(gathered, part)
    remove_saved_models(directory)
    for name, part, part_directory in parts:
        part_state = states[name]
        if is_peft_model(part):
            save_adapter(part, part_directory, part_state)
            continue
        cast_to = dtype if part is models.policy else None
        if cast_to is not None:
            part_state = part.state_dict() if part_state is None else part_state
            part_state = _in_type(part_state, cast_to, cast(Any, part)._get_dtype_plan(cast_to))
        with nullcontext() if isinstance(part, ValueHead) else original_outputs(part):
            cast(Any, part).save_pretrained(part_directory, state_dict=part_state)
            if cast_to is not None:
                config = copy.deepcopy(cast(Any, part).config)
                config.dtype = cast_to
                config.save_pretrained(part_directory)


def _in_type(state_dict: Mapping[str, Tensor], dtype: torch.dtype, kept: Iterable[str]) -> dict[str, Tensor]:
    """Return the floating-point weights in another type, except those whose names match a pattern in `kept`.

    Tied weights stay one tensor.
    """
    converted: dict[tuple[int, torch.Size], Tensor] = {}
    for name, value in state_dict.items():
        if value.is_floating_point() and not any(re.search(part.replace("*", ".*"), name) for part in kept):
            converted[value.data_ptr(), value.shape] = value.to(dtype)
    return {name: converted.get((value.data_ptr(), value.shape), value) for name, value in state_dict.items()}


def save_all(run: RunState, directory: str, state_dict: Mapping[str, Tensor] | None) -> None:
    """Write the models, the tokenizer and the arguments in place of earlier ones; see `save_models`.

    A checkpoint always has the value model; other directories have it with `save_critic`, but a head always.

    Args:
        run: The run.
        directory: The policy's directory.
        state_dict: Weights of both models, or None.
    """
    models, is_checkpoint = run.models, directories.is_unfinished(directory)
    critic = CRITIC_DIR if _saves_critic(run) else None
    value_directory = VALUE_MODEL_DIR if is_checkpoint else critic
    dtype = None if is_checkpoint else getattr(models.policy, CHECKPOINT_DTYPE, None)
    check_start_elsewhere(run.starts, directory)
    with stopping_as_trained(models.policy, run.tokens):
        save_models(models, directory, state_dict, value_directory, dtype)
    (run.processor or run.tokenizer).save_pretrained(directory)
    if value_directory == CRITIC_DIR:
        _save_tokenizer_of_critic(run, directory)
    torch.save(run.args, os.path.join(directory, TRAINING_ARGS_NAME))


def _saves_critic(run: RunState) -> bool:
    return run.args.save_critic or isinstance(run.models.value_model, ValueHead)


def _save_tokenizer_of_critic(run: RunState, directory: str) -> None:
    if not isinstance(run.models.value_model, ValueHead):
        run.tokenizer.save_pretrained(os.path.join(directory, CRITIC_DIR))


def stopping_as_trained(policy: nn.Module, tokens: SpecialTokens) -> AbstractContextManager[None]:
    """Let the policy's `generation_config` end responses where training does, while it is saved."""
    model, strings = transformers_model(policy), tokens.stop_strings
    config = getattr(model, "generation_config", None)
    if config is None:
        return nullcontext()
    stops = {"eos_token_id": list(tokens.stops) if tokens.stops[1:] else tokens.stop} if tokens.stops else {}
    stops |= {"stop_strings": None if strings is None else list(strings.strings)}
    return replaced(model, generation_config=changed(config, **stops))


def _with_prefix(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}


def load_models(models: PolicyAndValue, checkpoint: str, load: Callable[[str, nn.Module], None]) -> None:
    """Load both models from a checkpoint.

    Args:
        models: Both models.
        checkpoint: The checkpoint's directory.
        load: Loads a model's weights from a directory, as Trainer does.

    Raises:
        ValueError: Weights are missing or unknown: the checkpoint is of another model.
    """
    of_values = os.path.join(checkpoint, VALUE_MODEL_DIR)
    for part, directory in ((models.policy, checkpoint), (models.value_model, of_values)):
        if is_peft_model(part):
            _check_same_model(load_adapter_weights(part, directory))
        elif isinstance(part, ValueHead):
            part.load(directory)
        elif is_converted_on_save(part):
            load_converted(part, directory)
        else:
            load(directory, part)


def check_loaded(models: PolicyAndValue, result: Any) -> None:
    """Check that a checkpoint had the weights of the model that was loaded.

    Args:
        models: Both models.
        result: What `load_state_dict` returned.

    Raises:
        ValueError: Weights are missing or unknown: the checkpoint is of another model.
    """
    tied = {name for part in (models.policy, models.value_model) for name in _tied_names(part)}
    _check_same_model([*(set(result.missing_keys) - tied), *result.unexpected_keys])


def _check_same_model(differences: Sequence[str]) -> None:
    if differences:
        raise ValueError(
            f"the checkpoint is of another model, which differs in {sorted(differences)[:3]}; pass the model, and "
            "the adapter's settings, that the run was started with"
        )


def kinds_of(models: PolicyAndValue) -> dict[str, str]:
    """Return what is trained in both models, by their arguments; see `Progress.kinds`."""
    kinds = {}
    for argument, part in (("model", models.policy), ("value_model", models.value_model)):
        whole = "a head on the policy" if isinstance(part, ValueHead) else "all weights"
        kinds[argument] = f"a {adapter_kind(part)} adapter" if is_peft_model(part) else whole
    return kinds


def trained_parts(models: PolicyAndValue) -> dict[str, Any]:
    """Return kinds of the trained models, settings of adapters, dtypes of the policy, and the value model's origin."""
    parts = {"policy": models.policy, "value_model": models.value_model}
    adapters = {name: adapter_settings(part) for name, part in parts.items() if is_peft_model(part)}
    described: dict[str, Any] = {"trained": kinds_of(models), "adapters": adapters or None}
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in models.policy.parameters()}
    described["dtypes"] = sorted(dtypes)
    if not isinstance(models.value_model, ValueHead):
        described["value_model"] = origin(models.value_model)
    return {name: value for name, value in described.items() if value is not None}


def _check_same_kinds(models: PolicyAndValue, saved: Progress, checkpoint: str) -> None:
    """Check that a checkpoint has the same kinds of models, and adapters of the same settings."""
    before, now = saved.kinds, kinds_of(models)
    _check_same_model([f"{name}: {before[name]}, now {now[name]}" for name in before if before[name] != now[name]])
    of_values = os.path.join(checkpoint, VALUE_MODEL_DIR)
    for argument, part, directory in (
        ("model", models.policy, checkpoint),
        ("value_model", models.value_model, of_values),
    ):
        if is_peft_model(part):
            _check_same_model([f"{argument}: {change}" for change in changed_settings(part, directory)])


def _check_same_optimizer(args: PPOConfig, saved: Progress, checkpoint: str) -> None:
    """Check that a checkpoint's optimizer state is of the same kind of optimizer; fused or not is the same."""
    now = comparable_arguments(args)["optim"]
    before = saved.arguments.get("optim", now)
    if before.removesuffix("_fused") != now.removesuffix("_fused"):
        raise ValueError(
            f"optim={now!r}, but {checkpoint} has the state of optim={before!r}: set optim={before!r}, or start a new "
            "run from the models in the checkpoint"
        )


def _tied_names(model: nn.Module) -> set[str]:
    """Return the names of weights that share their storage with another one."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict().items():
        names.setdefault(value.data_ptr(), []).append(name)
    return {name for group in names.values() if group[1:] for name in group}


def is_converted_on_save(model: nn.Module) -> bool:
    """Return whether transformers renames, splits or stacks a model's weights when it saves them.

    It does for mixtures of experts and for models of images and text.
    """
    state: dict[str, Tensor] = {name: value.to("meta") for name, value in model.state_dict().items()}
    return revert_weight_conversion(transformers_model(model), state).keys() != state.keys()


@torch.no_grad()
def load_converted(model: Any, directory: str) -> None:
    """Load weights of a model that `is_converted_on_save` through `from_pretrained`.

    Args:
        model: A transformers model; changed in place.
        directory: Directory that `save_pretrained` wrote.
    """
    with preserve_rng():
        loaded = type(model).from_pretrained(directory, dtype=next(model.parameters()).dtype)
    model.load_state_dict(loaded.state_dict())


@contextmanager
def without_frozen(run: RunState, model: nn.Module) -> Iterator[None]:
    """Leave the frozen base of adapters out of DeepSpeed's checkpoint.

    Trainer would do so for a `PeftModel`, which `PolicyAndValue` is not.

    Args:
        run: The run.
        model: The prepared model.
    """
    models = run.models
    has_base = any(is_peft_model(part) for part in (models.policy, models.value_model))
    if zero_stage(run.accelerator) is None or not has_base:
        yield
        return
    prepared = cast(Any, model)
    prepared.save_checkpoint = functools.partial(prepared.save_checkpoint, exclude_frozen_parameters=True)
    hook = models.register_state_dict_post_hook(_drop_frozen)
    try:
        yield
    finally:
        hook.remove()
        del prepared.save_checkpoint


def _drop_frozen(model: torch.nn.Module, state_dict: dict[str, object], prefix: str, metadata: object) -> None:
    """Drop frozen parameters under all of their names; DeepSpeed drops one name of a shared or tied parameter."""
    for name, parameter in model.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        if not parameter.requires_grad:
            state_dict.pop(name, None)


# ---- Checkpoints ----


@contextmanager
def writing_checkpoint(run: RunState, progress: Progress) -> Iterator[str]:
    """Yield a directory for a checkpoint of the latest update, which gets its name at the end of the block.

    Trainer's state is written last: a checkpoint without it is not complete.
    """
    args, accelerator, state = run.args, run.accelerator, run.state
    name = f"checkpoint-{state.global_step}"
    final = os.path.join(str(args.output_dir), name)
    directory = os.path.join(str(args.output_dir), directories.UNFINISHED, name)
    with raise_on_all_ranks(accelerator):
        if args.should_save:
            shutil.rmtree(os.path.dirname(directory), ignore_errors=True)  # of a killed process
            os.makedirs(directory)
            progress.num_processes, progress.kinds = accelerator.num_processes, kinds_of(run.models)
            progress.arguments = comparable_arguments(args)  # a callback may have changed them
            progress.save(directory)
            run.stateful.save(directory)
    with failing_together(accelerator):
        yield directory
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = final
        if args.should_save:
            _export_states([*run.callbacks.callbacks, run.control], state)
            state.save_to_json(os.path.join(directory, TRAINER_STATE_NAME))
    accelerator.wait_for_everyone()
    with raise_on_all_ranks(accelerator):
        if args.should_save:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(directory, final)
            os.rmdir(os.path.dirname(directory))
    run.last_checkpoint = final


def upload(run: RunState, push: Callable[[str], None], in_progress: Any) -> None:
    """Upload the policy of the latest checkpoint, with `push_to_hub`, in place of earlier models in `output_dir`.

    Args:
        run: The run.
        push: Trainer's upload: copies the policy from a checkpoint into `output_dir` and adds the tokenizer.
        in_progress: The latest upload, or None; Trainer skips this one until it is done, unless `hub_always_push`.
    """
    args, directory = run.args, str(run.args.output_dir)
    if not args.push_to_hub:
        return
    is_skipped = in_progress is not None and not in_progress.is_done() and not args.hub_always_push
    if args.process_index == 0 and args.hub_strategy != HubStrategy.END and not is_skipped:
        remove_saved_models(directory)
        if _saves_critic(run):
            values, critic = Path(str(run.last_checkpoint), VALUE_MODEL_DIR), Path(directory, CRITIC_DIR)
            shutil.copytree(values, critic, dirs_exist_ok=True)
            _save_tokenizer_of_critic(run, directory)
        if run.processor is not None:
            run.processor.save_pretrained(directory)
    push(str(run.last_checkpoint))


def _export_states(parts: Sequence[TrainerCallback | TrainerControl], state: TrainerState) -> None:
    """Put the states of callbacks and control into Trainer's state, in Trainer's form."""
    states: Any = {}
    for part in parts:
        if isinstance(part, ExportableState):
            states.setdefault(type(part).__name__, []).append(part.state())
    state.stateful_callbacks = states


def restore_states(args: PPOConfig, callbacks: Sequence[TrainerCallback], state: TrainerState) -> None:
    """Restore the counters of callbacks, such as a patience; the callbacks keep the arguments of this run."""
    if not args.restore_callback_states_from_checkpoint:
        return
    saved: Any = state.stateful_callbacks  # a list for each class, see `_export_states`
    states = {name: list(of_class) for name, of_class in saved.items()}
    for callback in callbacks:
        of_class = states.get(type(callback).__name__)
        if isinstance(callback, ExportableState) and of_class:
            for name, value in of_class.pop(0).get("attributes", {}).items():
                setattr(callback, name, value)


def failing_together(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Raise an error of one rank on all ranks; not with backends whose ranks synchronize while they save."""
    is_plain = zero_stage(accelerator) is None and not is_fsdp(accelerator)
    return raise_on_all_ranks(accelerator) if is_plain else nullcontext()


@contextmanager
def opened(run: RunState, train_dataset: Any, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
    """Check that the ranks are alike, and lock the run's directory; yield the checkpoint to resume from, or None.

    A run that does not continue one in this directory first moves the results of an earlier policy into `_earlier`.

    Args:
        run: The run, whose models are loaded later.
        train_dataset: The prepared training set.
        resume_from_checkpoint: As `PPOTrainer.train` takes it.
    """
    args, accelerator, directory = run.args, run.accelerator, str(run.args.output_dir)
    check_ranks_alike(run, train_dataset)
    wanted = args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
    with run.noting_error(), ExitStack() as stack:
        start = None
        with raise_on_all_ranks(accelerator):
            if args.process_index == 0:
                os.makedirs(directory, exist_ok=True)
                stack.enter_context(directories.locked(directory))
                start = directories.find_start(directory, wanted, args.overwrite_output_dir)
                if start is not None:
                    check_backend(start, accelerator)
                    saved = Progress.load(start)
                    _check_same_kinds(run.models, saved, start)
                    _check_same_optimizer(args, saved, start)
                elif args.overwrite_output_dir:
                    checkpoints = directories.list_checkpoints(directory)
                    _check_starts_stay(run.starts, checkpoints)
                    for checkpoint in checkpoints:
                        shutil.rmtree(checkpoint)
                continues = start is not None and os.path.samefile(os.path.dirname(os.path.realpath(start)), directory)
                if not continues and (earlier := directories.set_results_aside(directory)) is not None:
                    logger.warning(
                        f"output_dir={directory!r} held the results of an earlier run or call: they are in {earlier}."
                    )
        run.last_checkpoint = broadcast_object_list([start])[0]
        run.logged.forget()  # what a failed update has left
        yield run.last_checkpoint
    _warn_if_best_is_not_saved(run)


def _warn_if_best_is_not_saved(run: RunState) -> None:
    """Warn at the end of a run if the best evaluation has no checkpoint, so its model cannot be loaded."""
    trainer, best = cast(Trainer, run.trainer), run.state.best_global_step
    step = step_of_policy(trainer)
    if run.args.load_best_model_at_end and not trainer.is_in_train and best not in (None, step):
        logger.warning(
            f"load_best_model_at_end=True: the evaluation after update {best} was the best, but no checkpoint of it "
            f"was saved, so the policy is that of update {step}; set save_steps=eval_steps, or save_strategy='best'."
        )


def _check_starts_stay(starts: Mapping[str, str], checkpoints: Sequence[str]) -> None:
    """Check that no model that the run starts from, and would start from again, is in a checkpoint to be deleted."""
    deleted = [os.path.realpath(checkpoint) for checkpoint in checkpoints]
    for start, role in starts.items():
        if any(Path(os.path.realpath(start)).is_relative_to(checkpoint) for checkpoint in deleted):
            raise ValueError(
                f"overwrite_output_dir=True would delete {start!r}, {role}; choose another output_dir, or move it away"
            )


def check_backend(checkpoint: str, accelerator: Accelerator) -> None:
    """Check that a checkpoint has the optimizer state in the format of this launch mode.

    Raises:
        ValueError: It has none, and the optimizer would silently start without state.
    """
    names = ("optimizer.pt",)
    if zero_stage(accelerator) is not None:
        names = ("global_step*",)
    elif is_fsdp(accelerator):
        names = ("optimizer.bin", "optimizer_0")
    if not any(path for name in names for path in Path(checkpoint).glob(name)):
        raise ValueError(
            f"resume_from_checkpoint={checkpoint!r} has no {names[0]}: it was written with save_only_model=True or "
            "under another backend; launch with that backend, or start a new run with another output_dir, "
            f"model=<checkpoint>, value_model=<checkpoint>/{VALUE_MODEL_DIR} and the first run's model as ref_model"
        )


# ---- Resume ----

_NOT_COMPARED = NOT_OF_TRAINING | {
    *("local_batch_size", "micro_batch_size", "batch_size", "local_mini_batch_size", "mini_batch_size"),
    *("num_total_batches", "total_episodes", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs"),
    *("warmup_steps", "warmup_ratio", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
}
"""Also derived sizes, and arguments that are compared with `Progress.optimization` instead."""


_OF_BEST_MODEL = ("metric_for_best_model", "greater_is_better")
"""If one of these changes, the best figure so far cannot be compared with later ones."""


def comparable_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments that a resumed run is compared in, as JSON values and without secrets."""
    values = {
        name: value for name, value in args.to_dict().items() if name not in _NOT_COMPARED and not is_secret(name)
    }
    return json.loads(json.dumps(values, default=str))


def describe_changes(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return the arguments that have changed, with both values; empty if none has."""
    changed = [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    return ", ".join(f"{name}={now[name]!r} (was {before[name]!r})" for name in changed)


def resume(
    run: RunState, sizes: Sizes, checkpoint: str | None, num_prompts: int, num_updates_per_epoch: int
) -> Progress:
    """Return the progress of a checkpoint, with counts and unlogged metrics, or that of a new run.

    Args:
        run: The run, with Trainer's state of the checkpoint.
        sizes: Sizes of this run.
        checkpoint: The checkpoint's directory, or None.
        num_prompts: Rows of the data; 0 if unknown.
        num_updates_per_epoch: Updates of a pass over the data.

    Raises:
        ValueError: An update had another number of episodes.
    """
    progress, args, arguments = Progress(), run.args, comparable_arguments(run.args)
    if checkpoint is not None:
        progress = Progress.load(checkpoint)
        if progress.batch_size != sizes.batch_size:
            raise ValueError(
                f"{checkpoint} is of a run with batch_size={progress.batch_size} episodes per update, but it is "
                f"{sizes.batch_size} now: change per_device_train_batch_size or gradient_accumulation_steps"
            )
        if args.log_console == "line" and run.accelerator.is_main_process:
            done, updates = run.state.global_step, run.state.max_steps
            print_text(f"Continues from {checkpoint} (update {done} of {updates}).")
        if changes := describe_changes(progress.arguments, arguments):
            logger.warning(f"{checkpoint} is resumed with other arguments: {changes}.")
        run.state.compute_steps(args, sizes.num_total_batches)
        before = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME)).best_model_checkpoint
        best = os.path.join(str(args.output_dir), os.path.basename(before or ""))
        if any(progress.arguments.get(name) != arguments[name] for name in _OF_BEST_MODEL):
            run.state.best_metric = run.state.best_global_step = run.state.best_model_checkpoint = None
        elif before and os.path.isdir(best):  # the run may have moved, or output_dir was relative
            run.state.best_model_checkpoint = best
        if args.ignore_data_skip:
            progress.batches_in_epoch = 0
        has_other_data = (
            progress.num_generations != args.num_generations
            or progress.num_prompts not in (0, num_prompts)
            or (num_prompts > 0 and progress.batches_in_epoch > num_updates_per_epoch)
        )
        if progress.batches_in_epoch > 0 and has_other_data:
            progress.epoch, progress.batches_in_epoch = progress.epoch + 1, 0
            logger.warning(
                f"The prompts of an update have changed since {checkpoint} was written in the middle of a pass: a new "
                "pass begins. The run differs from an uninterrupted run."
            )
    progress.num_prompts, progress.arguments = num_prompts, arguments
    progress.batch_size, progress.num_generations = sizes.batch_size, args.num_generations
    run.state = PPOTrainerState.of(run.state, progress.episode)
    return progress


def reseed_if_processes_changed(run: RunState, progress: Progress) -> bool:
    """Reseed the processes if their number has changed; return whether it has."""
    if progress.num_processes == run.accelerator.num_processes:
        return False
    set_seed(run.args.seed + run.state.global_step, device_specific=True)
    run.streams.seed(run.args.seed, run.state.global_step)
    return True


def apply_settings(
    run: RunState, progress: Progress, optimization: Optimization, optimizer: Optimizer, rate: Callable[[], float]
) -> None:
    """Apply this run's arguments after a checkpoint's optimizer and schedule are loaded.

    Args:
        run: The run.
        progress: That of the checkpoint.
        optimization: This run's settings.
        optimizer: The prepared optimizer.
        rate: Returns the current learning rate.
    """
    done = run.state.global_step
    if is_fsdp(run.accelerator) and done == 0:
        optimizer.state.clear()  # torch took an empty step to save it; Adam counts that step
    if (changed := optimization.put_in_force(progress.optimization, done)) is not None:
        logger.warning(
            f"The checkpoint has other optimization settings; from update {done + 1} on these take effect: {changed}. "
            f"The learning rate is now {rate():.4g}."
        )


@contextmanager
def loading_without_policy_state(run: RunState, checkpoint: str) -> Iterator[None]:
    """Let FSDP load an optimizer without state for the policy, as written during critic warm-up.

    torch requires the state of every parameter with `requires_grad`.
    """
    trained = [parameter for parameter in run.models.policy.parameters() if parameter.requires_grad]
    if not is_fsdp(run.accelerator) or "policy" in _models_with_optimizer_state(checkpoint):
        trained = []
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _models_with_optimizer_state(directory: str) -> set[str]:
    """Return the models, by the first part of parameter names, for which FSDP saved an optimizer state."""
    if (unsharded := Path(directory, "optimizer.bin")).exists():
        names = torch.load(unsharded, map_location="meta", weights_only=True)["state"].keys()
    else:
        entries = FileSystemReader(Path(directory, "optimizer_0")).read_metadata().state_dict_metadata
        prefix = "optimizer.state."
        names = [entry.removeprefix(prefix) for entry in entries if entry.startswith(prefix)]
    return {name.partition(".")[0] for name in names}
