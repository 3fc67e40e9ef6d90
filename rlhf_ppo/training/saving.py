"""The run's directory: saving, the run's fingerprint, and resume from a checkpoint."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object, set_seed
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from rlhf_ppo.checkpoints import complete, files
from rlhf_ppo.checkpoints import run as runs
from rlhf_ppo.checkpoints import state as saved
from rlhf_ppo.checkpoints.complete import VALUE_MODEL_DIR
from rlhf_ppo.checkpoints.run import Entry, History, Run
from rlhf_ppo.checkpoints.state import PPOTrainerState, Progress
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import output_directory
from rlhf_ppo.models.adapters import load_adapter_weights
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import active_adapter, is_peft_model
from rlhf_ppo.processes.distributed import get_logger, is_fsdp, is_sharding, raise_on_all_ranks, zero_stage
from rlhf_ppo.reporting.completion_files import NUM_KEPT_COMPLETIONS, write_completions
from rlhf_ppo.reporting.metrics import MetricWindow
from rlhf_ppo.reporting.run_log import save_settings, where_results_are
from rlhf_ppo.rewards.functions import function_name
from rlhf_ppo.terminal import print_text
from rlhf_ppo.training.optimization import Optimization
from rlhf_ppo.training.run_state import RunState

logger = get_logger(__name__)

CRITIC_DIR = "critic"
"""Directory of the value model beside the policy, with `save_critic`."""


def save_models(
    models: PolicyAndValue, directory: str, state_dict: Mapping[str, Any] | None, value_directory: str | None
) -> None:
    """Write the models, or their adapters, in the format of `from_pretrained`.

    Args:
        models: Both models.
        directory: The policy's directory.
        state_dict: Weights of both models, gathered by an engine; None takes them from the models.
        value_directory: The value model's subdirectory; None does not write it.
    """
    parts = [("policy", models.policy, directory)]
    if value_directory is not None:
        parts.append(("value_model", models.value_model, os.path.join(directory, value_directory)))
    for prefix, part, part_directory in parts:
        part_state = None if state_dict is None else _with_prefix(state_dict, f"{prefix}.")
        adapters = {"selected_adapters": [active_adapter(part)]} if is_peft_model(part) else {}
        cast(Any, part).save_pretrained(part_directory, state_dict=part_state, **adapters)


def load_models(models: PolicyAndValue, checkpoint: str, load: Callable[[str, nn.Module], None]) -> None:
    """Load both models from a checkpoint.

    Args:
        models: Both models.
        checkpoint: The checkpoint's directory.
        load: Loads a model's weights from a directory, as Trainer does.

    Raises:
        ValueError: The checkpoint belongs to other models.
    """
    value_directory = os.path.join(checkpoint, VALUE_MODEL_DIR)
    parts = ((models.policy, checkpoint), (models.value_model, value_directory))
    for part, directory in parts:
        complete.check_fits(part, directory)
    for part, directory in parts:
        if is_peft_model(part):
            load_adapter_weights(part, directory)
        elif complete.is_converted_on_save(part):
            complete.load_converted(part, directory)
        else:
            load(directory, part)


@contextmanager
def loading_without_policy_state(checkpoint: str, policy: nn.Module) -> Iterator[None]:
    """Let FSDP load an optimizer without state for the policy, as written during critic warm-up.

    torch requires the state of every parameter with `requires_grad`.
    """
    held = [each for each in policy.parameters() if each.requires_grad]
    if "policy" in complete.models_with_optimizer_state(checkpoint):
        held = []
    for parameter in held:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


@contextmanager
def without_frozen(engine: nn.Module, models: PolicyAndValue, is_deepspeed: bool) -> Iterator[None]:
    """Leave the frozen base of adapters out of DeepSpeed's checkpoint.

    Trainer would do so for a PeftModel, but `PolicyAndValue` is none.

    Args:
        engine: The prepared model.
        models: Both models.
        is_deepspeed: Whether it is DeepSpeed's engine.
    """
    if not is_deepspeed or not any(is_peft_model(part) for part in (models.policy, models.value_model)):
        yield
        return
    saving = cast(Any, engine)
    saving.save_checkpoint = functools.partial(saving.save_checkpoint, exclude_frozen_parameters=True)
    hook = models.register_state_dict_post_hook(_drop_frozen)
    try:
        yield
    finally:
        hook.remove()
        del saving.save_checkpoint


def _drop_frozen(model: torch.nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Drop frozen parameters under all of their names; DeepSpeed drops one name of a shared or tied parameter."""
    for name, parameter in model.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        if not parameter.requires_grad:
            state_dict.pop(name, None)


def _with_prefix(state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}


class CheckpointWriter:
    """Write checkpoints, each complete once the files of all ranks exist.

    Args:
        run: The run.
        directory: The run's directory.
        write_card: Writes the model card.
    """

    def __init__(self, run: RunState, directory: RunDirectory, write_card: Callable[[], None]) -> None:
        self.run, self.args, self.accelerator, self.guard = run, run.args, run.accelerator, run.guard
        self.directory, self.write_card = directory, write_card

    def save(self, write: Callable[[str], None]) -> str:
        """Write a checkpoint and return its directory.

        Args:
            write: Writes Trainer's files and the reference's; takes the directory.
        """
        self.guard.check_weights()
        run_directory, num_updates = output_directory(self.args), self.run.state.global_step
        directory = os.path.join(run_directory, f"checkpoint-{num_updates}")
        with files.explaining_full_disk(directory, lambda: self.guard.last_checkpoint):
            written = os.path.join(run_directory, f"checkpoint-{num_updates}")
            if written != directory:  # Trainer has one name per update, which another checkpoint may have already
                written = os.path.join(run_directory, files.UNFINISHED, os.path.basename(written))
            self.write(written, write)
            self._commit(written, directory)
        self.guard.last_checkpoint = directory
        return directory

    def rotate(self, newest: str) -> None:
        """Delete the run's checkpoints beyond `save_total_limit`."""
        if self.args.should_save:
            best = self.run.state.best_model_checkpoint
            runs.rotate(output_directory(self.args), self.directory.run, self.args.save_total_limit, best, newest)

    def write(self, directory: str, write: Callable[[str], None]) -> None:
        """Write the files of a checkpoint: those of this package, and Trainer's.

        Args:
            directory: The checkpoint's directory.
            write: Writes Trainer's files and the reference's.
        """
        # Rotation and upload wait for the manifest.
        overridden = {"save_total_limit": None, "push_to_hub": False, "output_dir": os.path.dirname(directory)}
        self.run.is_saving = True
        try:
            with raise_on_all_ranks(self.accelerator):
                if self.args.should_save:
                    self._begin(directory)
            state, together = self.run.state, self._failing_in_saving()
            with self.run.override_args(**overridden), runs.last_entries(state), together:
                write(directory)
        finally:
            self.run.is_saving = False

    def _begin(self, directory: str) -> None:
        """Write this package's files into an empty directory."""
        run, progress = self.run, self.run.progress
        complete.start_checkpoint(directory)
        self.directory.run.save(directory)
        saved.save_fingerprint(directory, run.fingerprint)
        progress.pending_metrics = run.window.updates
        progress.batch_size, progress.num_generations = run.sizes.batch_size, run.args.num_generations
        progress.num_processes = self.accelerator.num_processes
        progress.num_logged = len(run.state.log_history)
        progress.save(directory)
        run.stateful.save(directory)
        self.directory.write_history(run.state.log_history)
        self.write_card()

    def _commit(self, written: str, directory: str) -> None:
        """Give a checkpoint its name and its manifest; the processes of a node share the hashing."""
        self.accelerator.wait_for_everyone()  # every rank has written its files before the manifest
        with raise_on_all_ranks(self.accelerator):
            if self.args.should_save and written != directory:
                complete.commit_checkpoint(written, directory)
        hashes = self._hashes(directory) if self.accelerator.num_processes > 1 else None
        with raise_on_all_ranks(self.accelerator):
            if self.args.should_save:
                files.write_manifest(directory, hashes)

    def _hashes(self, directory: str) -> dict[str, str]:
        """Hash this process's share of a checkpoint's files; return the hashes of this node's processes."""
        rank, count = self.accelerator.process_index, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        node, own = rank // count, {}
        with raise_on_all_ranks(self.accelerator):
            if node == 0 or self.args.save_on_each_node:
                own = files.hash_share(directory, rank % count, count)
        of_nodes = gather_object([(node, own)])
        return {name: value for at, found in of_nodes if at == node for name, value in found.items()}

    def _failing_in_saving(self) -> AbstractContextManager[None]:
        """Raise an error of one rank on all ranks; not with engines, whose ranks synchronize while they save."""
        is_plain = zero_stage(self.accelerator) is None and not is_fsdp(self.accelerator)
        return raise_on_all_ranks(self.accelerator) if is_plain else nullcontext()

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Keep Trainer from deleting checkpoints of other runs at the end of a run; delete this run's own."""
        limit, best = self.args.save_total_limit, self.run.state.best_model_checkpoint
        with self.run.override_args(save_total_limit=None):
            yield
        if self.args.should_save and limit == 1 and best is not None:
            runs.rotate(output_directory(self.args), self.directory.run, limit, best, None)

    def save_model(self, output_dir: str | None, is_of_checkpoint: bool, write: Callable[[], None]) -> None:
        """Save the policy and log its place; see `PPOTrainer.save_model`.

        Args:
            output_dir: The directory; the run's own when None.
            is_of_checkpoint: Whether it is part of a checkpoint, which is not logged.
            write: Writes as Trainer does.

        Raises:
            DivergenceError: A weight is not finite; nothing is written.
            DiskFullError: The disk is full.
        """
        own = output_directory(self.args)
        directory = own if output_dir is None else output_dir
        if not self.run.is_saving:
            self.guard.check_weights(together=is_sharding(self.accelerator))
            if self.args.should_save:
                files.remove_leftovers(directory)
                files.remove_links(directory)
        together = self._failing_in_saving() if self.run.is_saving else nullcontext()
        with files.explaining_full_disk(directory, lambda: self.guard.last_checkpoint), together:
            write()
        if not is_of_checkpoint and self.args.process_index == 0 and not self.args.disable_tqdm:
            print_text(where_results_are(directory, own))

    def save_files(
        self, output_dir: str | None, models: PolicyAndValue, tokenizer: Any, state_dict: dict[str, Any] | None
    ) -> None:
        """Write models, tokenizer and arguments, in the processes that save.

        Args:
            output_dir: The directory; the run's own when None.
            models: Both models; checkpoints hold the value model, and with `save_critic` the policy's directory too.
            tokenizer: The tokenizer, or None.
            state_dict: Weights of both models, gathered by an engine, or None.
        """
        if not self.args.should_save:
            return
        directory = output_directory(self.args) if output_dir is None else output_dir
        critic = CRITIC_DIR if self.args.save_critic else None
        save_models(models, directory, state_dict, VALUE_MODEL_DIR if self.run.is_saving else critic)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
            if critic is not None and not self.run.is_saving:
                tokenizer.save_pretrained(os.path.join(directory, critic))
        torch.save(self.run.args_as_given(), os.path.join(directory, "training_args.bin"))

    def naming_full_log(self) -> AbstractContextManager[None]:
        """Name the newest checkpoint in the error of a full disk during logging."""
        return files.explaining_full_disk(
            output_directory(self.args), lambda: self.guard.last_checkpoint, "what is logged or printed"
        )

    def checked_best(self) -> str:
        """Return the best checkpoint.

        Raises:
            ValueError: It was changed or damaged after it was written.
        """
        best = cast(str, self.run.state.best_model_checkpoint)
        with raise_on_all_ranks(self.accelerator):
            if self.args.process_index == 0 and (reason := files.find_damage(best)) is not None:
                raise ValueError(
                    f"load_best_model_at_end=True, but the best checkpoint, {best}, is no longer complete: {reason}; "
                    f"the newest one is {self.guard.last_checkpoint}"
                )
        return best


def run_fingerprint(
    run: RunState,
    models: PolicyAndValue,
    reference: nn.Module | None,
    reward_models: Sequence[nn.Module],
    train_dataset: Any,
) -> dict[str, Any]:
    """Describe arguments, data, tokenizer, rewards and frozen weights, without secrets.

    Args:
        run: The run.
        models: Policy and value model.
        reference: The reference, if it is a separate model.
        reward_models: The reward models.
        train_dataset: The prompts.
    """
    trained = [name for name, value in models.named_parameters() if value.requires_grad]
    return {
        "arguments": saved.comparable_arguments(run.args),
        "train_dataset": saved.describe_dataset(train_dataset),
        "processing_class": _described_tokenizer(run.tokenizer),
        "reward_funcs": {function_name(function): saved.hash_of_function(function) for function in run.reward_funcs},
        "reward_model": [saved.hash_of_weights(reward.parameters()) for reward in reward_models],
        "ref_model": None if reference is None else saved.hash_of_weights(reference.parameters()),
        "base_model": saved.hash_of_weights(value for value in models.parameters() if not value.requires_grad),
        "trained": saved.hash_of_text(" ".join(trained)),
        "num_trained": sum(value.requires_grad for value in models.parameters()),
    }


def compare_with(checkpoint: str, now: dict[str, Any]) -> None:
    """Log the changes since a checkpoint's run.

    Args:
        checkpoint: The checkpoint's directory.
        now: Result of `run_fingerprint`.

    Raises:
        ValueError: Other parameters are trained; the checkpoint's optimizer has no state for them.
    """
    before = saved.load_fingerprint(checkpoint)
    if before.get("trained") != now["trained"]:
        raise ValueError(
            f"resume_from_checkpoint={checkpoint!r} is of a run that trained {before.get('num_trained')} parameters, "
            f"but {now['num_trained']} are trained now, and they are not the same: its optimizer has no state for "
            f"them; train the same parameters, or {complete.NEW_RUN}"
        )
    if lines := saved.describe_changes(before, now):
        logger.warning("\n  ".join([f"{checkpoint} is resumed with changes:", *lines]))


def _described_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items())
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id]
    return saved.hash_of_text(json.dumps([vocabulary, special, str(getattr(tokenizer, "chat_template", None))]))


class RunDirectory:
    """The directory of a run, and the run's own checkpoints in it.

    Args:
        args: The arguments.
        accelerator: Gives the processes and the engine.

    Attributes:
        run: The run.
    """

    def __init__(self, args: PPOConfig, accelerator: Accelerator) -> None:
        self.args, self.accelerator = args, accelerator
        self.run = Run.new()
        self._history: History | None = None
        self._given_up: str | None = None  # a warning about abandoned checkpoints

    @contextmanager
    def opened(self, directory: str, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """Lock a directory in the block; yield the checkpoint to resume from, or None.

        Args:
            directory: The run's directory.
            resume_from_checkpoint: As `PPOTrainer.train` takes it.
        """
        with ExitStack() as stack:
            with raise_on_all_ranks(self.accelerator):
                if self.args.process_index == 0:
                    os.makedirs(directory, exist_ok=True)
                    stack.enter_context(runs.locked(directory))
                    files.remove_leftovers(directory)
            yield self._open(directory, resume_from_checkpoint)

    def _open(self, directory: str, resume_from_checkpoint: str | bool | None) -> str | None:
        """Start a new run, or find the run to continue and its checkpoint."""
        given = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        wanted = runs.parse_resume(given)
        opened: list[Any] = [None]
        self._given_up = None
        with raise_on_all_ranks(self.accelerator):
            if self.args.process_index == 0:
                runs.check_start(directory, wanted, self.args.overwrite_output_dir)
                if wanted is False:
                    opened = [(None, runs.start_run(directory, self.args.overwrite_output_dir))]
                else:
                    opened = [self._continue_run(directory, wanted)]
        checkpoint, self.run = broadcast_object_list(opened)[0]
        with raise_on_all_ranks(self.accelerator):
            if checkpoint is not None and self.args.should_save and self.args.process_index != 0:
                _check_complete(checkpoint)  # on another node's disk
        return checkpoint

    def _continue_run(self, directory: str, wanted: str | bool) -> tuple[str, Run]:
        checkpoint = _complete_checkpoint(directory, wanted)
        complete.check_engine(checkpoint, zero_stage(self.accelerator) is not None, is_fsdp(self.accelerator))
        step = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME)).global_step
        run, abandoned = runs.continue_run(directory, checkpoint, (step,))
        if abandoned:
            self._given_up = (
                f"Going on from {checkpoint}; what comes after it ({', '.join(abandoned)}) is not taken for this "
                "run's any more: it is neither resumed from nor deleted, and overwritten when its update comes again."
            )
        return checkpoint, run

    def note(
        self, directory: str, logged: Sequence[Entry], made_of: Mapping[str, Any], health: Mapping[str, Any]
    ) -> None:
        """Write the run's identity and settings into its directory, after all checks have passed.

        Args:
            directory: The run's directory.
            logged: Entries logged so far.
            made_of: Names of policy and rewards.
            health: Settings of the health checks.
        """
        with raise_on_all_ranks(self.accelerator):
            if self.args.should_save:
                self.run.save(directory)
                save_settings(directory, self.args, made_of, health)
                self._history = History(directory, logged)
        if self._given_up is not None:
            logger.warning(self._given_up)

    def write_logged(self, logged: Sequence[Entry], rows: list[dict[str, Any]]) -> None:
        """Write new log entries, and the kept responses of the logged update.

        Args:
            logged: Entries logged so far.
            rows: This rank's responses, from `KeptCompletions.rows`.
        """
        rows = gather_object(rows)[:NUM_KEPT_COMPLETIONS]
        with raise_on_all_ranks(self.accelerator):
            self.write_history(logged)
            if rows and self.args.process_index == 0:
                write_completions(output_directory(self.args), rows)

    def write_history(self, logged: Sequence[Entry]) -> None:
        """Append the new log entries."""
        if self._history is not None:
            self._history.write(logged)


def _complete_checkpoint(directory: str, wanted: str | bool) -> str:
    """Return the directory of the complete checkpoint to resume from."""
    if isinstance(wanted, str):
        _check_complete(wanted)
        return wanted
    found = complete.last_complete_checkpoint(directory)
    if found is None:
        raise runs.no_checkpoint(directory)
    return found


def _check_complete(directory: str) -> None:
    reason = complete.why_incomplete(directory)
    if reason is not None:
        raise ValueError(
            f"resume_from_checkpoint={directory!r} is not a complete checkpoint: {reason}; pass another directory, or "
            "True for the newest complete one"
        )


def resume(
    run: RunState,
    checkpoint: str | None,
    num_prompts: int,
    num_updates_per_epoch: int,
    fingerprint: Callable[[], dict[str, Any]],
) -> None:
    """Restore counts, unlogged metrics and a partial update from a checkpoint, or start without one.

    Args:
        run: The run, with Trainer's state of the checkpoint.
        checkpoint: The checkpoint's directory, or None.
        num_prompts: Rows of the data; 0 if unknown.
        num_updates_per_epoch: Updates of a pass over the data.
        fingerprint: Describes the run, in the processes that save.
    """
    run.progress, accelerator, args = Progress(), run.accelerator, run.args
    if checkpoint is not None:
        run.progress = progress = Progress.load(checkpoint)
        run.state.log_history = runs.full_history(checkpoint, run.state.log_history, progress.num_logged)
        is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        complete.check_same_processes(progress, run.sizes.batch_size, accelerator.num_processes, is_deepspeed)
        run.state.compute_steps(args, run.sizes.num_total_batches)
        if args.ignore_data_skip:
            progress.batches_in_epoch = 0
        same_batches = progress.num_generations == args.num_generations
        find_position(checkpoint, run.state, progress, num_updates_per_epoch, num_prompts, same_batches)
    run.fingerprint = {}
    with raise_on_all_ranks(accelerator):
        if args.should_save or args.process_index == 0:
            run.fingerprint = fingerprint()
        if checkpoint is not None and args.process_index == 0:
            compare_with(checkpoint, run.fingerprint)
    run.progress.num_prompts = num_prompts
    run.window = MetricWindow(run.progress.pending_metrics)
    run.state = PPOTrainerState.of(run.state, run.progress.episode)


def find_position(
    checkpoint: str,
    state: TrainerState,
    progress: Progress,
    num_updates_per_epoch: int,
    num_prompts: int,
    same_batches: bool,
) -> None:
    """Set the position in the data at which a resumed run begins; log it if the data has changed.

    Args:
        checkpoint: The checkpoint's directory.
        state: The checkpoint's state, with this run's number of updates.
        progress: The checkpoint's progress; changed data begin a new pass.
        num_updates_per_epoch: Updates of a pass.
        num_prompts: Rows of the data; 0 if unknown.
        same_batches: Whether an update takes as many prompts as before.
    """
    if state.global_step >= state.max_steps:
        logger.warning(
            f"{checkpoint} is of update {state.global_step} and the run has {state.max_steps}: nothing is left to "
            "train. For more updates raise max_steps, total_episodes or num_train_epochs."
        )
    if progress.batches_in_epoch > 0 and not same_batches:
        _begin_pass(progress)
        logger.warning(
            f"num_generations has changed since {checkpoint} was written in the middle of a pass, and with it the "
            "number of prompts of an update: a new pass begins. The run differs from an uninterrupted run."
        )
    if not num_prompts:
        return
    changed = progress.num_prompts not in (0, num_prompts) or progress.batches_in_epoch > num_updates_per_epoch
    if changed and progress.batches_in_epoch > 0:
        _begin_pass(progress)
        logger.warning(
            f"train_dataset now has {num_prompts} prompts, and had another number when {checkpoint} was written in "
            "the middle of a pass: a new pass begins, over the new prompts. The run differs from an uninterrupted run."
        )


def _begin_pass(progress: Progress) -> None:
    progress.epoch, progress.batches_in_epoch = progress.epoch + 1, 0


def reseed_if_processes_changed(run: RunState) -> bool:
    """Reseed the processes if their number has changed; return whether it has."""
    if run.progress.num_processes == run.accelerator.num_processes:
        return False
    set_seed(run.args.seed + run.state.global_step, device_specific=True)
    run.streams.seed(run.args.seed, run.state.global_step)
    return True


def apply_own_optimization(
    run: RunState, optimization: Optimization, checkpoint: str, optimizer: Any, learning_rate: Callable[[], float]
) -> None:
    """Apply this run's arguments after a checkpoint's optimizer and schedule are loaded.

    Args:
        run: The run.
        optimization: This run's settings.
        checkpoint: The checkpoint's directory.
        optimizer: The prepared optimizer.
        learning_rate: Returns the current learning rate.
    """
    done = run.state.global_step
    if is_fsdp(run.accelerator) and done == 0:
        optimizer.state.clear()  # torch took an empty step to save it; Adam counts that step
    if (changed := optimization.put_in_force(run.progress.optimization, done)) is not None:
        logger.warning(
            f"The checkpoint has other optimization settings; from update {done + 1} on these take effect: {changed}. "
            f"The learning rate is now {learning_rate():.4g}."
        )
