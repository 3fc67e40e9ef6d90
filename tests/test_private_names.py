"""Private names of libraries that the package uses: a new version may drop any of them, and this test names it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from accelerate.state import GradientState
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments

PACKAGE = Path(__file__).parents[1] / "rlhf_ppo"
NAMES = {
    Trainer: (
        "_clip_grad_norm _determine_best_metric _evaluate _finalize_training _finish_current_push "
        "_get_collator_with_removed_columns _get_dataloader _get_grad_norm _get_learning_rate "
        "_get_train_sampler _init_training_state _inner_training_loop _load_best_model _load_from_checkpoint "
        "_load_optimizer_and_scheduler _load_rng_state _maybe_log_save_evaluate _prepare_for_training "
        "_push_from_checkpoint _remove_unused_columns _save _save_checkpoint _save_optimizer_and_scheduler "
        "_save_rng_state _save_scaler"
    ),
    TrainingArguments: "_setup_devices",
    PreTrainedModel: "_can_set_attn_implementation _from_config _get_dtype_plan _no_split_modules _supports_sdpa",
    PreTrainedConfig: "_attn_implementation _name_or_path",
    GradientState: "_set_sync_gradients",
}
OF_PYTHON_AND_TORCH = {
    *("_actions", "_asdict", "_exit", "_forward_hooks", "_forward_pre_hooks", "_group_actions", "_max_workers"),
    *("_modules", "_optionals", "_parameters", "_replace"),
}


@pytest.mark.parametrize("owner", NAMES, ids=lambda owner: owner.__name__)
def test_the_library_has_them(owner: type) -> None:
    found = owner() if owner is PreTrainedConfig else owner
    assert [name for name in NAMES[owner].split() if not hasattr(found, name)] == []


def test_the_list_is_whole() -> None:
    """A private name that no file of the package defines, or that is taken from `super()`, is another's."""
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    read = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = {node.attr for node in read if node.attr not in own or ast.unparse(node.value) == "super()"}
    imported = {each.name for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0
                and not str(node.module).startswith("rlhf_ppo") for each in node.names}  # fmt: skip
    private = {name for name in used | imported if name.startswith("_") and not name.startswith("__")}
    assert private - {name for names in NAMES.values() for name in names.split()} - OF_PYTHON_AND_TORCH == set()
