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
from rlhf_ppo.trainer_base import TrainerBase

PACKAGE = Path(inspect.getfile(PPOTrainer)).parent
FILES = [PACKAGE / name for name in ("trainer.py", "trainer_base.py")]
TRAINER = inspect.getsource(Trainer)

OWN_SIGNATURE = {"__init__", "_get_dataloader", "create_model_card"}
"""Overrides that pass all arguments on, or that Trainer calls by keywords or not at all."""

CALLED: dict[str, tuple[str, ...]] = {
    "_clip_grad_norm": ("model",),
    "_determine_best_metric": ("metrics", "trial"),
    "_finalize_training": ("trial", "num_train_samples", "start_time"),
    "_get_grad_norm": ("model", "grad_norm"),
    "_init_training_state": (
        "max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial",
    ),
    "_maybe_log_save_evaluate": (
        "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time", "learning_rate",
    ),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
}  # fmt: skip
"""Trainer's private methods that are called with arguments and not overridden."""

SET = ("_created_lr_scheduler", "_globalstep_last_logged", "_initial_num_input_tokens_seen", "_signature_columns")
SET += ("_total_loss_scalar", "_tr_loss", "_trial", "is_in_train", "objective")
"""Attributes that the package sets for Trainer to read."""


def complaint(what: str) -> str:
    return f"transformers {transformers.__version__}: {what}; look at rlhf_ppo/trainer_base.py"


def parameters_of(owner: type, name: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(owner, name)).parameters)[1:]


def test_overrides_and_calls_take_what_trainer_takes() -> None:
    overridden = {
        name
        for owner in (TrainerBase, PPOTrainer)
        for name, value in vars(owner).items()
        if inspect.isfunction(value) and inspect.isfunction(getattr(Trainer, name, None))
    }
    assert "_inner_training_loop" in overridden and len(overridden) > 25
    for name in overridden - OWN_SIGNATURE:
        assert parameters_of(PPOTrainer, name) == parameters_of(Trainer, name), complaint(
            f"Trainer.{name} has changed"
        )
    for name, parameters in CALLED.items():
        assert parameters_of(Trainer, name) == parameters, complaint(f"{name} has changed")


def test_what_is_used_of_trainer_exists() -> None:
    """Each attribute of `self` that the package does not define is Trainer's; so is what it sets for Trainer."""
    used, own = set[str](), set[str]()
    for node in (node for path in FILES for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            own.add(ast.unparse(node.target))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()", "parent", "trainer"):
            (own if isinstance(node.ctx, ast.Store) else used).add(node.attr)
    gone = {name for name in used - own if not hasattr(Trainer, name) and f"self.{name}" not in TRAINER}
    assert gone == set(), complaint(f"Trainer has no {sorted(gone)}")
    unread = {name for name in SET if f"self.{name}" not in TRAINER}
    assert unread == set(), complaint(f"Trainer does not read {sorted(unread)}")


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (GradientState, ["_set_sync_gradients"]),
        (PreTrainedModel, ["_no_split_modules", "gradient_checkpointing_enable"]),
        (TrainingArguments, ["_setup_devices", "get_warmup_steps"]),
        (TrainerState, ["save_to_json", "load_from_json", "compute_steps", "init_training_references"]),
        (CallbackHandler, ["on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_prediction_step"]),
    ],
)
def test_private_names_of_other_classes(owner: type, names: list[str]) -> None:
    for name in names:
        assert hasattr(owner, name), complaint(f"{owner.__name__}.{name} is gone")
