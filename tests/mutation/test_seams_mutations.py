"""Break what Trainer is told about PPO in one place at a time: its tests must notice every time."""

import shutil
from pathlib import Path

import pytest

from tests.mutation.nursery import ROOT, Nursery, assert_killed, assert_passed, mutate

SEAMS, SIZES, SCHEDULES, OPTIMIZATION = "seams.py", "sizes.py", "schedules.py", "optimization.py"
TESTS = {
    SEAMS: ["tests/test_seams.py"],
    SIZES: ["tests/test_sizes.py"],
    SCHEDULES: ["tests/test_schedules.py"],
    OPTIMIZATION: ["tests/test_optimization.py"],
}
MUTATIONS = [
    (SEAMS, "loss / (self.args.num_ppo_epochs * self.args.num_mini_batches)", "loss / self.args.num_ppo_epochs"),
    (SEAMS, "loss / (self.args.num_ppo_epochs * self.args.num_mini_batches)", "loss / self.args.num_mini_batches"),
    (SEAMS, "loss / (self.args.num_ppo_epochs * self.args.num_mini_batches)", "loss"),
    (SEAMS, "isolated_rng(seed + epoch,", "isolated_rng(seed,"),
    (SEAMS, "with self._data_order(epoch):", "with self._data_order():"),
    (SEAMS, "with self._data_order(epoch):", "with nullcontext():"),
    (SEAMS, "self.args.seed if self.args.data_seed is None else self.args.data_seed", "self.args.seed"),
    (SEAMS, "cast(Any, loader).set_epoch(epoch)", "cast(Any, loader).set_epoch(0)"),
    (SEAMS, "skip_first_batches(loader, num_skipped)", "skip_first_batches(loader, num_skipped - 1)"),
    (SEAMS, "else self._progress.batches_in_epoch", "else 0"),
    (SEAMS, "self._progress.batches_in_epoch += 1", "self._progress.batches_in_epoch += 2"),
    (SEAMS, "math.ceil(num_updates / per_epoch)", "num_updates // per_epoch"),
    (SEAMS, "state.global_step / self._updates_per_epoch", "state.global_step"),
    (SEAMS, "self._progress.episode += cast(int, args.batch_size)", "self._progress.episode += 1"),
    (SEAMS, "cast(Any, self.lr_scheduler).step()", "pass"),
    (SEAMS, "if is_last or", "if True or"),
    (SEAMS, "if is_last or", "if not is_last or"),
    (SEAMS, "        model.zero_grad()\n        return cast", "        return cast"),
    (SEAMS, "if self.args.max_grad_norm > 0 else None", "if False else None"),
    (SEAMS, "if self.args.max_grad_norm > 0 else None", ""),
    (SEAMS, 'if counted == "non_padding" else', 'if counted == "all" else'),
    (SEAMS, 'if counted != "no":', "if True:"),
    (SEAMS, "self.args.dataloader_drop_last = is_training", "self.args.dataloader_drop_last = True"),
    (SIZES, "local * num_processes // num_mini_batches", "local // num_mini_batches"),
    (SIZES, "num_examples < local * num_processes", "num_examples < local"),
    (SIZES, "local % num_mini_batches:", "per_device % num_mini_batches:"),
    (SIZES, "math.ceil(total_episodes / batch_size), ", "total_episodes // batch_size, "),
    (SIZES, "total_episodes or max_steps * batch_size", "max_steps * batch_size"),
    (SIZES, "max(1, int(num_train_epochs * (num_examples or 0)))", "int(num_train_epochs * (num_examples or 0))"),
    (SCHEDULES, "for _ in range(num_steps):", "for _ in range(num_steps - 1):"),
    (SCHEDULES, "pair[0] != pair[1]", "pair[0] == pair[1]"),
    (SCHEDULES, 'group["lr"].fill_(float(rate))', 'group["lr"] = rate'),
    (SCHEDULES, 'group["initial_lr"] = copy.deepcopy(own["initial_lr"])', "pass"),
    (SCHEDULES, 'not name.startswith("_") and name not in counted', "True"),
    (SCHEDULES, "* new / old", "* old / new"),
    (OPTIMIZATION, "settings.put_in_force(changed, self.state.global_step)", "pass"),
    (OPTIMIZATION, "check_covers(given[0], self.model)", "pass"),
    (OPTIMIZATION, "check_covers(self.optimizer, prepared[0])", "pass"),
    (OPTIMIZATION, "check_covers(self.optimizer, model)", "pass"),
    (OPTIMIZATION, "if id(parameter) not in held", "if id(parameter) in held"),
    (OPTIMIZATION, "        if parameter.requires_grad\n", ""),
]


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    """A copy of what the tests import."""
    shutil.copytree(ROOT / "rlhf_ppo", tmp_path / "rlhf_ppo", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    for file in [*(ROOT / "tests").glob("[!t]*.py"), *(ROOT / file for files in TESTS.values() for file in files)]:
        shutil.copy(file, tmp_path / "tests")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("file", list(TESTS))
def test_the_untouched_copy_passes(sandbox: Path, nursery: Nursery, file: str):
    assert_passed(nursery.run(sandbox, TESTS[file]))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "original", "mutant"), MUTATIONS)
def test_the_mutant_is_killed(sandbox: Path, nursery: Nursery, file: str, original: str, mutant: str):
    mutate(sandbox / "rlhf_ppo" / file, original, mutant)
    assert_killed(nursery.run(sandbox, TESTS[file]))
