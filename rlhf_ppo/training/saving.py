"""Saving and loading the two trained models: whole checkpoints, and the policy alone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput

from rlhf_ppo.checkpoints.disk import UNFINISHED, naming_full_disk, remove_leftovers
from rlhf_ppo.checkpoints.fits import (
    check_engine,
    check_fits,
    check_optimizer,
    is_saved_under_other_names,
    load_under_other_names,
    naming,
    optimizer_name,
)
from rlhf_ppo.checkpoints.half_learned import half_learned_in
from rlhf_ppo.checkpoints.history import History, last_entries
from rlhf_ppo.checkpoints.lock import locked
from rlhf_ppo.checkpoints.manifest import write_manifest
from rlhf_ppo.checkpoints.progress import PPOTrainerState, Progress
from rlhf_ppo.checkpoints.record import save_record
from rlhf_ppo.checkpoints.run import Run, check_start, continue_run, rotate, start_run, wanted_checkpoint
from rlhf_ppo.checkpoints.whole import (
    VALUE_MODEL_DIR,
    last_whole_checkpoint,
    put_in_place,
    start_checkpoint,
    what_is_missing,
    what_was_changed,
)
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.sizes import Sizes
from rlhf_ppo.models.adapters import load_adapter_weights
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.unwrapping import is_peft_model
from rlhf_ppo.processes.collectives import gather_over_ranks
from rlhf_ppo.processes.engines import is_sharding
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.reporting.metrics import MetricWindow
from rlhf_ppo.reporting.results import where_results_are
from rlhf_ppo.training.divergence import DivergenceGuard
from rlhf_ppo.training.half_learned import FinishesHalfLearned

logger = get_logger(__name__)


class SavesPolicyAndValue(FinishesHalfLearned, Trainer):
    """Trainer of a `PolicyAndValue`: in a checkpoint the policy stands at the root, the value model below it."""

    args: PPOConfig
    state: PPOTrainerState
    model: PolicyAndValue
    sizes: Sizes
    _guard: DivergenceGuard

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.state = PPOTrainerState.of(self.state)
        self._progress = Progress()
        self._window = MetricWindow()
        self._run = Run.new()
        self._history: History | None = None
        self._given_up: str | None = None  # what is said of later checkpoints that the run does not take for its own
        self._record: dict[str, Any] = {}
        self._given: dict[str, Any] = {}
        self._writing_checkpoint = False  # the value model belongs into checkpoints, not into what save_model writes

    @contextmanager
    def _opened_run(self, trial: Any, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """Keep other runs out of the run's directory; yield the checkpoint from which the run goes on, or None."""
        directory = self._get_output_dir(trial)
        with ExitStack() as stack:
            with failing_together(self.accelerator):
                if self.is_world_process_zero():
                    os.makedirs(directory, exist_ok=True)
                    stack.enter_context(locked(directory))
                    remove_leftovers(directory)
            yield self._open_run(directory, resume_from_checkpoint)

    def _open_run(self, directory: str, resume_from_checkpoint: str | bool | None) -> str | None:
        """Start a run in its directory, or find the one that goes on, and the checkpoint from which it does."""
        said = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        wanted = wanted_checkpoint(said)
        opened: list[Any] = [None]
        self._given_up = None
        with failing_together(self.accelerator):
            if self.is_world_process_zero():
                check_start(directory, wanted, self.args.overwrite_output_dir)
                if wanted is False:
                    opened = [(None, start_run(directory, self.args.overwrite_output_dir))]
                else:
                    opened = [self._continue_run(directory, wanted)]
        checkpoint, self._run = broadcast_object_list(opened)[0]
        with failing_together(self.accelerator):
            if checkpoint is not None and self.args.should_save and not self.is_world_process_zero():
                _check_whole(checkpoint)  # of another node's own disk
        return checkpoint

    def _note_run(self, trial: Any) -> None:
        """Write into the directory whose run it is, once nothing refuses that run any more."""
        with failing_together(self.accelerator):
            if self.args.should_save:
                self._run.save(self._get_output_dir(trial))
                self._history = History(self._get_output_dir(trial), self.state.log_history)
        if self._given_up is not None:
            logger.warning(self._given_up)

    def _continue_run(self, directory: str, wanted: str | bool) -> tuple[str, Run]:
        checkpoint = self._resolve_checkpoint(directory, wanted)
        check_engine(checkpoint, self.is_deepspeed_enabled, self.is_fsdp_enabled)
        step = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME)).global_step
        learned = half_learned_in(checkpoint)
        run, abandoned = continue_run(directory, checkpoint, (step,) if learned is None else (step, learned))
        later = f"{', '.join(abandoned)}) is not taken for this run's any more: it is neither resumed from nor deleted"
        told = (
            f"Going on from {checkpoint}; what comes after it ({later}, and overwritten when its update comes again."
        )
        self._given_up = told if abandoned else None
        return checkpoint, run

    def _resolve_checkpoint(self, directory: str, wanted: str | bool) -> str:
        """Turn what the user said about resuming into the directory of a whole checkpoint."""
        if wanted is not True:
            _check_whole(cast(str, wanted))
            return cast(str, wanted)
        found = last_whole_checkpoint(directory)
        if found is None:
            raise ValueError(
                f"resume_from_checkpoint=True, but output_dir={directory!r} holds no whole checkpoint; "
                "leave it out to start a new run"
            )
        return found

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self._guard.check_weights()
        run_directory = self._get_output_dir(trial)
        directory = os.path.join(run_directory, self._checkpoint_name())
        with naming_full_disk(directory, lambda: self._guard.last_checkpoint):
            written = os.path.join(run_directory, f"checkpoint-{self.state.global_step}")
            if written != directory:  # Trainer knows one name only, which another checkpoint may have
                written = os.path.join(run_directory, UNFINISHED, os.path.basename(written))
            self._write_checkpoint(written, model, trial)
            self._mark_as_whole(written, directory)
        self._guard.last_checkpoint = directory
        if self.args.push_to_hub:
            self._push_from_checkpoint(directory)
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate(run_directory, self._run, self.args.save_total_limit, best, directory)

    def _write_checkpoint(self, directory: str, model: torch.nn.Module, trial: Any) -> None:
        self._progress.keep_losses(gather_over_ranks(self.accelerator)(self._tr_loss.reshape(1)).tolist())
        with failing_together(self.accelerator):
            if self.args.should_save:
                self._begin_checkpoint(directory)
        self._writing_checkpoint = True
        try:
            # the first two wait for the manifest
            withheld = {"save_total_limit": None, "push_to_hub": False, "output_dir": os.path.dirname(directory)}
            with self._withholding(**withheld), last_entries(self.state), self._failing_in_saving():
                super()._save_checkpoint(model, trial)
        finally:
            self._writing_checkpoint = False

    def _mark_as_whole(self, written: str, directory: str) -> None:
        self.accelerator.wait_for_everyone()  # every rank's files are there before the manifest says so
        with failing_together(self.accelerator):
            if self.args.should_save:
                if written != directory:
                    put_in_place(written, directory)
                write_manifest(directory)

    def _failing_in_saving(self) -> AbstractContextManager[None]:
        """Raise an error of one rank on all; not under engines, whose ranks wait for each other while they save."""
        is_plain = not (self.is_deepspeed_enabled or self.is_fsdp_enabled)
        return failing_together(self.accelerator) if is_plain else nullcontext()

    def _begin_checkpoint(self, directory: str) -> None:
        """Write what this package adds to a checkpoint, into an empty directory."""
        start_checkpoint(directory)
        self._run.save(directory)
        save_record(directory, {**self._record, "optimizer": optimizer_name(self.optimizer)})
        self._progress.last_logged_step = self._globalstep_last_logged
        self._progress.pending_metrics = self._window.updates
        self._progress.batch_size = self.sizes.batch_size
        self._progress.num_processes = self.accelerator.num_processes
        self._progress.skipped = dataclasses.asdict(self._guard.skipped)
        self._progress.num_logged = len(self.state.log_history)
        self._progress.save(directory)
        cast(History, self._history).write(self.state.log_history)
        self.create_model_card()

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        with self._withholding(save_total_limit=None):  # Trainer would delete checkpoints of other runs as well
            output = super()._finalize_training(trial, num_train_samples, start_time)
        if self.args.should_save and limit == 1 and best is not None:
            rotate(self._get_output_dir(trial), self._run, limit, best, newest=None)
        return output

    @contextmanager
    def _withholding(self, **values: Any) -> Iterator[None]:
        """Give arguments other values while the context lasts; what is written to disk keeps those that were given."""
        self._given = {name: getattr(self.args, name) for name in values}
        try:
            _set(self.args, values)
            yield
        finally:
            _set(self.args, self._given)
            self._given = {}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        parts = (self._unwrapped(self.model).policy, self._unwrapped(self.model).value_model)
        if self.is_deepspeed_enabled and any(is_peft_model(part) for part in parts):
            engine = cast(Any, self.model_wrapped)  # Trainer sees no PeftModel, and would have the frozen base written
            engine.save_checkpoint = functools.partial(engine.save_checkpoint, exclude_frozen_parameters=True)
            hook = self._unwrapped(self.model).register_state_dict_post_hook(_drop_frozen)
            try:
                super()._save_optimizer_and_scheduler(output_dir)
            finally:
                hook.remove()
                del engine.save_checkpoint
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy (or its adapter) and the tokenizer, loadable with `from_pretrained`, under every launcher.

        Then say in one line where policy, curves and samples are, where progress is shown.

        Args:
            output_dir: Where to; `args.output_dir` when None.

        Raises:
            DivergenceError: A weight is not finite; nothing is written then.
            DiskFullError: There is no room.
        """
        directory = cast(str, self.args.output_dir if output_dir is None else output_dir)
        if not self._writing_checkpoint:
            self._guard.check_weights(together=is_sharding(self.accelerator))
            if self.args.should_save:
                remove_leftovers(directory)
        together = self._failing_in_saving() if self._writing_checkpoint else nullcontext()
        with naming_full_disk(directory, lambda: self._guard.last_checkpoint), together:
            self._save_whole_model(output_dir, _internal_call)
        if not _internal_call and self.is_world_process_zero() and not self.args.disable_tqdm:
            print(where_results_are(directory, cast(str, self.args.output_dir)))

    def _save_whole_model(self, output_dir: str | None, _internal_call: bool) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type):
            # Trainer writes nothing here for sharded checkpoints
            self._save(output_dir, state_dict=cast(Any, self.accelerator.get_state_dict(self.model_wrapped)))
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        directory = cast(str, self.args.output_dir if output_dir is None else output_dir)
        if not self.args.should_save:
            return
        wrapper = self._unwrapped(self.model)
        parts = [("policy", wrapper.policy, directory)]
        if self._writing_checkpoint:
            parts.append(("value_model", wrapper.value_model, os.path.join(directory, VALUE_MODEL_DIR)))
        for prefix, part, part_directory in parts:
            part_state = None if state_dict is None else _with_prefix(state_dict, f"{prefix}.")
            adapters = {"selected_adapters": [cast(Any, part).active_adapter]} if is_peft_model(part) else {}
            cast(Any, part).save_pretrained(part_directory, state_dict=part_state, **adapters)
        if self.processing_class is not None:
            cast(Any, self.processing_class).save_pretrained(directory)
        args = copy.copy(self.args)
        _set(args, self._given)
        torch.save(args, os.path.join(directory, "training_args.bin"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        wrapper = self._unwrapped(self.model)
        value_directory = os.path.join(resume_from_checkpoint, VALUE_MODEL_DIR)
        parts = ((wrapper.policy, resume_from_checkpoint), (wrapper.value_model, value_directory))
        for part, directory in parts:
            check_fits(part, directory)
        for part, directory in parts:
            if is_peft_model(part):
                load_adapter_weights(part, directory)
            elif is_saved_under_other_names(part):
                load_under_other_names(part, directory)
            else:
                super()._load_from_checkpoint(directory, part)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        check_optimizer(self.optimizer, checkpoint)
        with naming(checkpoint, "its optimizer.pt or scheduler.pt"):
            super()._load_optimizer_and_scheduler(checkpoint)
        if self.is_fsdp_enabled and self.state.global_step == 0 and not half_learned_in(checkpoint):
            cast(Any, self.optimizer).state.clear()  # torch has taken an empty step to save it, which Adam counts

    def _load_best_model(self) -> None:
        best = cast(str, self.state.best_model_checkpoint)
        with failing_together(self.accelerator):
            if self.is_world_process_zero() and (reason := what_was_changed(best)) is not None:
                raise ValueError(
                    f"load_best_model_at_end=True, but the best checkpoint, {best}, is not whole any more: {reason}; "
                    f"the newest one is {self._guard.last_checkpoint}"
                )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            super()._load_best_model()
            return
        logger.info(f"Loading the best model from {best} ({self.state.best_metric}).")
        self._load_from_checkpoint(best)

    def _unwrapped(self, model: torch.nn.Module) -> PolicyAndValue:
        return cast(PolicyAndValue, self.accelerator.unwrap_model(model, keep_torch_compile=False))


def _check_whole(directory: str) -> None:
    reason = what_is_missing(directory)
    if reason is not None:
        raise ValueError(
            f"resume_from_checkpoint={directory!r} is no whole checkpoint: {reason}; pass another directory, or True "
            "for the newest whole one"
        )


def _set(args: PPOConfig, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(args, name, value)


def _drop_frozen(model: torch.nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Leave out what is frozen by all its names; DeepSpeed knows but one of a parameter that is shared or tied."""
    for name, parameter in model.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        if not parameter.requires_grad:
            state_dict.pop(name, None)


def _with_prefix(state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
