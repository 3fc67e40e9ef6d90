"""Save checkpoints, and the policy alone."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import nn

from rlhf_ppo.checkpoints.complete import (
    VALUE_MODEL_DIR,
    check_fits,
    commit_checkpoint,
    is_converted_on_save,
    load_converted,
    models_with_optimizer_state,
    start_checkpoint,
)
from rlhf_ppo.checkpoints.files import (
    UNFINISHED,
    explaining_full_disk,
    find_damage,
    hash_share,
    remove_leftovers,
    remove_links,
    write_manifest,
)
from rlhf_ppo.checkpoints.run import last_entries
from rlhf_ppo.checkpoints.state import save_fingerprint
from rlhf_ppo.config.ppo_config import output_directory
from rlhf_ppo.models.adapters import load_adapter_weights
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import active_adapter, is_peft_model
from rlhf_ppo.processes.distributed import is_fsdp, is_sharding, raise_on_all_ranks, zero_stage
from rlhf_ppo.reporting.run_log import where_results_are
from rlhf_ppo.terminal.console import hide_library_warnings, hide_model_bars
from rlhf_ppo.terminal.text import print_text
from rlhf_ppo.training.learning import InterruptibleLearning
from rlhf_ppo.training.resuming import RunDirectory
from rlhf_ppo.training.run_state import RunState

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
        with hide_model_bars():
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
        check_fits(part, directory)
    for part, directory in parts:
        if is_peft_model(part):
            load_adapter_weights(part, directory)
        elif is_converted_on_save(part):
            load_converted(part, directory)
        else:
            with hide_library_warnings():
                load(directory, part)


@contextmanager
def loading_without_policy_state(checkpoint: str, policy: nn.Module) -> Iterator[None]:
    """Let FSDP load an optimizer without state for the policy, as written during critic warm-up.

    torch requires the state of every parameter with `requires_grad`.

    Args:
        checkpoint: The checkpoint's directory.
        policy: The trained language model.
    """
    held = [each for each in policy.parameters() if each.requires_grad]
    if "policy" in models_with_optimizer_state(checkpoint):
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
        learning: Holds the partial update.
        write_card: Writes the model card.
    """

    def __init__(
        self, run: RunState, directory: RunDirectory, learning: InterruptibleLearning, write_card: Callable[[], None]
    ) -> None:
        self.run, self.args, self.accelerator, self.guard = run, run.args, run.accelerator, run.guard
        self.directory, self.learning, self.write_card = directory, learning, write_card

    def save(self, write: Callable[[str], None]) -> str:
        """Write a checkpoint and return its directory.

        Args:
            write: Writes Trainer's files and the reference's; takes the directory.
        """
        self.guard.check_weights()
        run_directory, num_updates = output_directory(self.args), self.run.state.global_step
        directory = os.path.join(run_directory, self.learning.checkpoint_name(num_updates))
        with explaining_full_disk(directory, lambda: self.guard.last_checkpoint):
            written = os.path.join(run_directory, f"checkpoint-{num_updates}")
            if written != directory:  # Trainer has one name per update, which another checkpoint may have already
                written = os.path.join(run_directory, UNFINISHED, os.path.basename(written))
            self.write(written, write)
            self._mark_as_whole(written, directory)
        self.guard.last_checkpoint = directory
        return directory

    def rotate(self, newest: str) -> None:
        """Delete the run's checkpoints beyond `save_total_limit`."""
        if self.args.should_save:
            best = self.run.state.best_model_checkpoint
            self.directory.rotate(output_directory(self.args), self.args.save_total_limit, best, newest)

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
            with self.run.override_args(**overridden), last_entries(state), together:
                write(directory)
        finally:
            self.run.is_saving = False

    def _begin(self, directory: str) -> None:
        """Write this package's files into an empty directory."""
        run, progress = self.run, self.run.progress
        start_checkpoint(directory)
        self.directory.run.save(directory)
        save_fingerprint(directory, run.fingerprint)
        progress.pending_metrics = run.window.updates
        progress.batch_size, progress.num_generations = run.sizes.batch_size, run.args.num_generations
        progress.num_processes = self.accelerator.num_processes
        progress.skipped = dataclasses.asdict(self.guard.skipped)
        progress.num_logged = len(run.state.log_history)
        progress.save(directory)
        run.stateful.save(directory)
        self.directory.write_history(run.state.log_history)
        self.write_card()

    def _mark_as_whole(self, written: str, directory: str) -> None:
        """Commit a checkpoint: give it its name and its manifest; the processes of a node share the hashing."""
        self.accelerator.wait_for_everyone()  # every rank has written its files before the manifest
        with raise_on_all_ranks(self.accelerator):
            if self.args.should_save and written != directory:
                commit_checkpoint(written, directory)
        hashes = self._hashes(directory) if self.accelerator.num_processes > 1 else None
        with raise_on_all_ranks(self.accelerator):
            if self.args.should_save:
                write_manifest(directory, hashes)

    def _hashes(self, directory: str) -> dict[str, str]:
        """Hash this process's share of a checkpoint's files; return the hashes of this node's processes."""
        rank, count = self.accelerator.process_index, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        node, own = rank // count, {}
        with raise_on_all_ranks(self.accelerator):
            if node == 0 or self.args.save_on_each_node:
                own = hash_share(directory, rank % count, count)
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
            self.directory.rotate(output_directory(self.args), limit, best, newest=None)

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
                remove_leftovers(directory)
                remove_links(directory)
        together = self._failing_in_saving() if self.run.is_saving else nullcontext()
        with explaining_full_disk(directory, lambda: self.guard.last_checkpoint), together:
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
        directory = output_directory(self.args) if output_dir is None else output_dir
        if self.args.should_save:
            critic = CRITIC_DIR if self.args.save_critic else None
            save_models(models, directory, state_dict, VALUE_MODEL_DIR if self.run.is_saving else critic)
            places = (
                [directory] if self.run.is_saving or critic is None else [directory, os.path.join(directory, critic)]
            )
            for place in places:
                if tokenizer is not None:
                    tokenizer.save_pretrained(place)
            torch.save(self.run.args_as_given(), os.path.join(directory, "training_args.bin"))

    def naming_full_log(self) -> AbstractContextManager[None]:
        """Name the newest checkpoint in the error of a full disk during logging."""
        return explaining_full_disk(
            output_directory(self.args), lambda: self.guard.last_checkpoint, "what is logged or printed"
        )

    def checked_best(self) -> str:
        """Return the best checkpoint.

        Raises:
            ValueError: It was changed or damaged after it was written.
        """
        best = cast(str, self.run.state.best_model_checkpoint)
        with raise_on_all_ranks(self.accelerator):
            if self.args.process_index == 0 and (reason := find_damage(best)) is not None:
                raise ValueError(
                    f"load_best_model_at_end=True, but the best checkpoint, {best}, is no longer complete: {reason}; "
                    f"the newest one is {self.guard.last_checkpoint}"
                )
        return best
