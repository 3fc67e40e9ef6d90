"""Mutants of the trainer's own files."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("trainer_base.py", "tests/training/test_hooks.py::test_a_resumed_pass_has_the_same_order"): [
        ("num_skipped=run.progress.batches_in_epoch", "num_skipped=0"),
        ("run.progress.batches_in_epoch += 1", "run.progress.batches_in_epoch += 2"),
    ],
    (
        "trainer_base.py",
        "tests/training/test_evaluate.py::test_every_row_counts_once_also_in_a_part_of_a_batch",
    ): [
        ("dataloader_drop_last=is_training", "dataloader_drop_last=True"),
    ],
    ("trainer_base.py", "tests/training/test_hooks.py::test_episodes_epochs_and_tokens_are_counted"): [
        ("state.global_step / loop.updates_per_epoch", "state.global_step"),
        ("run.progress.episode += self.sizes.batch_size", "run.progress.episode += 1"),
    ],
    (
        "trainer_base.py",
        "tests/training/test_trainer_arguments.py::test_learning_rate_follows_the_schedule_by_update",
    ): [
        ("self.lr_scheduler.step()\n        state", "pass\n        state"),
    ],
    ("trainer_base.py", "tests/training/test_hooks.py::test_no_gradient_is_carried_into_the_next_optimizer_step"): [
        ("        model.zero_grad()\n        return grad_norm", "        return grad_norm"),
    ],
    ("trainer_base.py", "tests/training/test_hooks.py::test_the_gradient_is_clipped_where_a_norm_is_set"): [
        ("if args.max_grad_norm > 0 else None", "if False else None"),
        ("if args.max_grad_norm > 0 else None", ""),
    ],
    (
        "trainer_base.py",
        "tests/training/test_hooks.py::test_the_logged_loss_is_the_mean_over_the_optimizer_steps_since_the_last_log",
    ): [
        ("loss / self._learning.num_minibatches", "loss / args.num_ppo_epochs"),
        ("loss / self._learning.num_minibatches", "loss / args.num_mini_batches"),
        ("loss / self._learning.num_minibatches", "loss"),
    ],
}
