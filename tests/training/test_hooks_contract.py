"""What the package uses of Trainer's inside; after an upgrade of transformers, a failure here says what moved."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import transformers
from accelerate.state import GradientState
from transformers import PreTrainedModel, Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from rlhf_ppo import PPOTrainer

PACKAGE = Path(inspect.getfile(PPOTrainer)).parent
FILES = [PACKAGE / name for name in ("trainer.py", "trainer_base.py", "training/publishing.py")]

# Trainer's methods that the package calls or overrides: their parameters, in order.
METHODS: dict[str, tuple[str, ...]] = {
    "add_callback": ("callback",),
    "_clip_grad_norm": ("model",),
    "_determine_best_metric": ("metrics", "trial"),
    "_evaluate": ("trial", "ignore_keys_for_eval", "skip_scheduler"),
    "_finalize_training": ("trial", "num_train_samples", "start_time"),
    "_finish_current_push": (),
    "_get_collator_with_removed_columns": ("data_collator", "description"),
    "_get_dataloader": ("dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key"),
    "_get_grad_norm": ("model", "grad_norm"),
    "_get_learning_rate": (),
    "_get_output_dir": ("trial",),
    "_get_train_sampler": ("train_dataset",),
    "_hp_search_setup": ("trial",),
    "_init_training_state": (
        "max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial",
    ),
    "_inner_training_loop": ("batch_size", "args", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "_load_best_model": (),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "_maybe_log_save_evaluate": (
        "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time", "learning_rate",
    ),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_remove_unused_columns": ("dataset", "description"),
    "_report_to_hp_search": ("trial", "step", "metrics"),
    "_save": ("output_dir", "state_dict"),
    "_save_checkpoint": ("model", "trial"),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_save_rng_state": ("output_dir",),
    "_set_signature_columns_if_needed": (),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "compute_loss_context_manager": (),
    "create_model_card": (
        "language", "license", "tags", "model_name", "finetuned_from", "tasks", "dataset_tags", "dataset",
        "dataset_args",
    ),
    "create_optimizer": ("model",),
    "create_scheduler": ("num_training_steps", "optimizer"),
    "evaluate": ("eval_dataset", "ignore_keys", "metric_key_prefix"),
    "evaluation_loop": ("dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"),
    "hyperparameter_search": (
        "hp_space", "compute_objective", "n_trials", "direction", "backend", "hp_name", "kwargs",
    ),
    "get_eval_dataloader": ("eval_dataset",),
    "get_train_dataloader": (),
    "is_world_process_zero": (),
    "log": ("logs", "start_time"),
    "num_examples": ("dataloader",),
    "save_model": ("output_dir", "_internal_call"),
    "set_initial_training_values": ("args", "dataloader"),
    "train": ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
}  # fmt: skip

# Trainer's own attributes that the package reads or sets, and what Trainer does with them.
ATTRIBUTES: dict[str, str] = {
    "_created_lr_scheduler": "makes a new scheduler in the next call of train",
    "_globalstep_last_logged": "divides the loss that is logged",
    "_initial_num_input_tokens_seen": "counts the tokens of this call of train",
    "_signature_columns": "the columns that are kept",
    "_total_loss_scalar": "adds up the losses for train_loss",
    "_tr_loss": "adds up the loss until it is logged",
    "_trial": "names the search's runs for trackers",
    "accelerator": "prepares models, gathers and reduces",
    "args": "the arguments",
    "callback_handler": "calls the callbacks",
    "compute_objective": "what a search compares",
    "control": "what callbacks ask for",
    "data_collator": "makes batches",
    "eval_dataset": "the prompts of evaluations",
    "hub_model_id": "the repository",
    "hp_search_backend": "whether a search has made the trainer",
    "init_hf_repo": "makes the repository",
    "is_deepspeed_enabled": "who loads and saves",
    "is_fsdp_enabled": "who loads and saves",
    "is_in_train": "tells callbacks and the hub",
    "lr_scheduler": "the learning rate",
    "model": "what is saved",
    "model_wrapped": "what is called",
    "objective": "what a trial has come to",
    "optimizer": "takes the steps",
    "push_in_progress": "waits for it",
    "processing_class": "is saved with the policy",
    "state": "steps, epochs, history",
    "train_dataset": "the prompts",
}

# Attributes that the oldest supported transformers does not read yet; setting them there does no harm.
NEWER_ATTRIBUTES = {"_initial_global_step"}

REPLACED = {"push_to_hub"}
"""What is Trainer's in name and signature only; Trainer does not call it."""


def complaint(what: str) -> str:
    return f"transformers {transformers.__version__}: {what}; look at rlhf_ppo/trainer_base.py"


@pytest.mark.parametrize("name", METHODS)
def test_trainer_still_has_the_method(name: str) -> None:
    method = getattr(Trainer, name, None)
    assert method is not None, complaint(f"Trainer.{name} is gone")
    parameters = tuple(inspect.signature(method).parameters)[1:]
    assert parameters == METHODS[name], complaint(f"Trainer.{name} takes {parameters}, no longer {METHODS[name]}")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_trainer_still_has_the_attribute(name: str) -> None:
    assert f"self.{name}" in inspect.getsource(Trainer), complaint(f"Trainer.{name} ({ATTRIBUTES[name]}) is gone")


def test_overrides_take_what_trainer_passes() -> None:
    for name in METHODS.keys() - {"create_model_card"}:  # which is called by keywords
        own = inspect.signature(getattr(PPOTrainer, name)).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in own):
            continue
        names = tuple(parameter.name for parameter in own)[1:]
        assert names == METHODS[name], f"PPOTrainer.{name} takes {names}, Trainer passes {METHODS[name]}"


def test_nothing_else_of_trainer_is_used() -> None:
    """Every name of Trainer's that the package's trainer uses or overrides stands in one of the tables above."""
    used: set[str] = set()
    own: set[str] = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                (used if hasattr(Trainer, node.name) else own).add(node.name)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
                "self",
                "super()",
                "parent",
                "trainer",
            ):
                used.add(node.attr)
    source = inspect.getsource(Trainer)
    of_trainer = {name for name in used - own if hasattr(Trainer, name) or f"self.{name} =" in source}
    unlisted = {name for name in of_trainer if not name.startswith("__")} - METHODS.keys() - ATTRIBUTES.keys()
    unlisted -= NEWER_ATTRIBUTES | REPLACED
    assert not unlisted, f"add to METHODS or ATTRIBUTES: {sorted(unlisted)}"


def test_trainer_calls_what_is_overridden_where_it_is_expected() -> None:
    expected = {
        "train": ["self._load_from_checkpoint(resume_from_checkpoint)", "self._inner_training_loop"],
        "_save_checkpoint": [
            "self.save_model(output_dir, _internal_call=True)",
            "self._save_optimizer_and_scheduler(output_dir)",
            "self._save_rng_state(output_dir)",
            "self.state.save_to_json(",
            "if self.args.push_to_hub:",
            "save_total_limit=self.args.save_total_limit",
        ],
        "save_model": ["self._save(output_dir"],
        "_finalize_training": ["self._load_best_model()", "self.callback_handler.on_train_end("],
        "_maybe_log_save_evaluate": ["self._evaluate(", "self._save_checkpoint(model, trial)"],
        "_prepare_for_training": ["self._load_optimizer_and_scheduler(resume_from_checkpoint)"],
    }
    for name, calls in expected.items():
        source = inspect.getsource(getattr(Trainer, name))
        places = [source.find(call) for call in calls]
        for call, place in zip(calls, places, strict=True):
            assert place >= 0, complaint(f"Trainer.{name} no longer calls {call}")
        assert places == sorted(places), complaint(f"Trainer.{name} calls {calls} in another order")


def test_private_names_of_other_classes() -> None:
    private = {
        GradientState: ["_set_sync_gradients"],
        PreTrainedModel: ["_no_split_modules", "gradient_checkpointing_enable"],
        TrainingArguments: ["_setup_devices", "get_warmup_steps"],
        TrainerState: ["save_to_json", "load_from_json", "compute_steps", "init_training_references"],
        CallbackHandler: ["on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_prediction_step"],
    }
    for owner, names in private.items():
        for name in names:
            assert hasattr(owner, name), complaint(f"{owner.__name__}.{name} is gone")
