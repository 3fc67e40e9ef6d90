"""Break what Trainer is told about PPO in one place at a time: its tests must notice every time."""

import shutil
from pathlib import Path

import pytest

from tests.mutation.nursery import (
    ROOT,
    Nursery,
    assert_killed,
    assert_passed,
    assert_there_once,
    copy_package,
    mutate,
)

HOOKS, LOOP, SIZES, SCHEDULES = "training/hooks.py", "training/loop.py", "config/sizes.py", "training/schedules.py"
OPTIMIZATION, FIGURES = "training/optimization.py", "training/figures.py"
STEPPING, ORDER = "training/stepping.py", "training/data_order.py"
FILES = {file: f"tests/{file.replace('/', '/test_')}" for file in (HOOKS, SIZES, SCHEDULES, OPTIMIZATION)}
FILES |= dict.fromkeys((STEPPING, ORDER, LOOP, FIGURES), FILES[HOOKS])
LOSS = "loss / (args.num_ppo_epochs * args.num_mini_batches)"

# The tests that must notice (all of the file's where the name is empty), and what they must notice.
MUTATIONS = {
    "the_logged_loss_is_the_mean_over_the_optimizer_steps_since_the_last_log": [
        (STEPPING, LOSS, "loss / args.num_ppo_epochs"),
        (STEPPING, LOSS, "loss / args.num_mini_batches"),
        (STEPPING, LOSS, "loss"),
    ],
    "each_pass_has_an_order_of_its_own_that_the_seed_alone_decides": [
        (ORDER, "isolated_rng(seed + epoch,", "isolated_rng(seed,"),
        (ORDER, "with data_order(args, epoch):", "with data_order(args):"),
        (ORDER, "with data_order(args, epoch):", "if True:"),
        (ORDER, "args.seed if args.data_seed is None else args.data_seed", "args.seed"),
        (ORDER, "cast(Any, loader).set_epoch(epoch)", "cast(Any, loader).set_epoch(0)"),
    ],
    "a_resumed_pass_has_the_same_order": [
        (ORDER, "skip_first_batches(loader, num_skipped)", "skip_first_batches(loader, num_skipped - 1)"),
        (HOOKS, "else self._progress.batches_in_epoch", "else 0"),
        (LOOP, "run._progress.batches_in_epoch += 1", "run._progress.batches_in_epoch += 2"),
    ],
    "episodes_epochs_and_tokens_are_counted": [
        (ORDER, "math.ceil(num_updates / per_epoch)", "num_updates // per_epoch"),
        (LOOP, "state.global_step / self._updates_per_epoch", "state.global_step"),
        (LOOP, "run._progress.episode += run.sizes.batch_size", "run._progress.episode += 1"),
        (FIGURES, 'if counted == "non_padding" else', 'if counted == "all" else'),
        (FIGURES, 'if counted != "no":', "if True:"),
    ],
    "gradients_are_exchanged_with_the_last_micro_batch_only": [
        (STEPPING, "if is_last or", "if True or"),
        (STEPPING, "if is_last or", "if not is_last or"),
    ],
    "no_gradient_is_carried_into_the_next_optimizer_step": [
        (STEPPING, "        model.zero_grad()\n        return grad_norm", "        return grad_norm"),
    ],
    "the_gradient_is_clipped_where_a_norm_is_set": [
        (STEPPING, "if args.max_grad_norm > 0 else None", "if False else None"),
        (STEPPING, "if args.max_grad_norm > 0 else None", ""),
    ],
    "evaluation_covers_every_row_and_training_full_batches_only": [
        (HOOKS, "dataloader_drop_last=is_training", "dataloader_drop_last=True"),
    ],
    "the_rate_is_that_of_the_schedule_at_every_update": [
        (LOOP, "run.lr_scheduler.step()", "pass"),
    ],
    "a_longer_run_has_the_schedule_of_its_length_and_its_rate": [
        (OPTIMIZATION, "settings.put_in_force(changed, num_updates)", "pass"),
        (OPTIMIZATION, 'num_total_batches": num_updates', 'num_total_batches": 0'),
    ],
    "an_optimizer_without_the_value_model_is_refused": [
        (OPTIMIZATION, "if optimizer is not None:\n            check_covers(optimizer, model)", ""),
        (OPTIMIZATION, "if id(parameter) not in held", "if id(parameter) in held"),
    ],
    "a_subclass_whose_optimizer_lacks_parameters_is_stopped_before_the_first_update": [
        (OPTIMIZATION, "if not is_sharding and not layer_by_layer:", "if False:"),
    ],
    "what_is_frozen_on_purpose_need_not_be_held": [
        (OPTIMIZATION, "        if parameter.requires_grad\n", ""),
    ],
    "": [
        (SIZES, "batch // num_mini_batches", "local // num_mini_batches"),
        (SIZES, "num_examples < batch", "num_examples < local"),
        (SIZES, "local % num_mini_batches:", "per_device % num_mini_batches:"),
        (SIZES, "math.ceil(total_episodes / batch_size), ", "total_episodes // batch_size, "),
        (SIZES, "total_episodes or max_steps * batch_size", "max_steps * batch_size"),
        (SIZES, "max(1, int(num_train_epochs * (num_examples or 0)))", "int(num_train_epochs * (num_examples or 0))"),
        (SCHEDULES, "for _ in range(num_steps):", "for _ in range(num_steps - 1):"),
        (SCHEDULES, "pair[0] != pair[1]", "pair[0] == pair[1]"),
        (SCHEDULES, "* new / old", "* old / new"),
        (SCHEDULES, 'group["lr"].fill_(float(rate))', 'group["lr"] = rate'),
        (SCHEDULES, 'group["initial_lr"] = copy.deepcopy(own["initial_lr"])', "pass"),
        (SCHEDULES, 'not name.startswith("_") and name not in counted', "True"),
    ],
}


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    """A copy of what the tests import."""
    copy_package(tmp_path)
    for file in FILES.values():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def files_of(file: str, name: str) -> list[str]:
    return [f"{FILES[file]}::test_{name}" if name else FILES[file]]


@pytest.mark.parametrize(("file", "original"), sorted({each[:2] for group in MUTATIONS.values() for each in group}))
def test_what_is_broken_is_there(file: str, original: str):
    assert_there_once(ROOT / "rlhf_ppo" / file, original)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MUTATIONS))
def test_the_untouched_copy_passes(sandbox: Path, nursery: Nursery, name: str):
    for file in sorted({file for file, _, _ in MUTATIONS[name]}):
        assert_passed(nursery.run(sandbox, files_of(file, name)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "original", "mutant"), [(name, *mutation) for name in MUTATIONS for mutation in MUTATIONS[name]]
)
def test_the_mutant_is_killed(sandbox: Path, nursery: Nursery, name: str, file: str, original: str, mutant: str):
    mutate(sandbox / "rlhf_ppo" / file, original, mutant)
    assert_killed(nursery.run(sandbox, files_of(file, name)))
