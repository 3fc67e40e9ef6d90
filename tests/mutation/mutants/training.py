"""Mutants of the room `training`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    (
        "learning.py",
        "tests/training/test_recipes.py::test_an_option_changes_the_update_the_same_however_it_is_cut_and_learned",
    ): [
        ("loss = loss * part.loss_weights", "pass"),
        ("loss - args.entropy_coef * entropy", "loss"),
    ],
    ("learning.py", "tests/training/test_added_losses.py::test_responses_with_a_good_score_are_imitated"): [
        (
            "mask, minibatch.is_positive, num_tokens, run.sum_over_ranks",
            "mask, minibatch.is_positive, num_tokens * len(mask)",
        ),
    ],
    ("learning.py", "tests/training/test_critic_warmup.py::test_the_policy_stays_and_nothing_of_it_is_begun"): [
        ("parameter.grad = None", "pass"),
    ],
    (
        "learning.py",
        "tests/training/test_critic_warmup.py::test_the_policy_does_not_depend_on_num_critic_epochs_within_an_update",
    ): [
        ("self.critic_only.in_critic_epoch = learned.num_minibatches >= num_shared", "pass"),
        ("args.num_ppo_epochs if args.num_critic_epochs is None else args.num_critic_epochs", "args.num_ppo_epochs"),
    ],
    ("learning.py", "tests/training/test_critic_ensemble.py"): [
        ("advantages.masked_fill(agreed, 0.0)", "advantages"),
        ("lowest_share(-spread, mask", "lowest_share(spread, mask"),
    ],
    ("rollouts.py", "tests/generation/test_overlap.py::test_jobs_are_of_an_update_and_a_rank"): [
        ("run.args.seed, update, run.args.process_index)", "run.args.seed, update, 0)"),
        ("run.args.seed, update, run.args.process_index)", "run.args.seed, 0, run.args.process_index)"),
        ("check_lengths(prompts.input_ids.shape[1], run.args.response_length, self.longest_sequence)", "pass"),
    ],
    ("rollouts.py", "tests/training/test_critic_ensemble.py"): [
        ("% values.shape[-1]", "% 1"),
        ("correction=0", "correction=1"),
    ],
    (
        "learning.py",
        "tests/training/test_critic_warmup.py::"
        "test_warmup_ends_before_the_first_update_whose_values_are_good_and_stays_over",
    ): [("if found >= gate:", "if found <= gate:")],
    (
        "learning.py",
        "tests/training/test_critic_warmup.py::"
        "test_the_value_model_learns_returns_of_lambda_1_as_if_the_policy_had_no_loss",
    ): [("1.0 if warms_up else lam_critic", "lam_critic")],
    (
        "learning.py",
        "tests/training/test_turns.py::"
        "test_the_value_of_a_turns_first_token_learns_alone_and_micro_batches_change_nothing",
    ): [("loss * part.value_weights", "loss")],
    ("learning.py", "tests/training/test_recipes.py::test_epochs_end_once_the_policy_has_moved_far_enough"): [
        ("learned.epoch_start = len(statistics.sums)", "pass"),
        ("return kl > limit", "return kl < limit"),
        ("learned.num_minibatches % per_epoch:", "False:"),
    ],
    (
        "optimization.py",
        "tests/training/test_recipes.py::test_the_value_model_learns_at_its_own_rate_on_the_same_schedule",
    ): [
        ('group["lr"] if rate is None else rate}', 'group["lr"]}'),
        ('if name.startswith("value_model.")}', 'if name.startswith("policy.")}'),
    ],
    ("learning.py", "tests/training/test_recipes.py::test_two_lambdas_are_two_passes"): [
        ("advantages, returns if is_shared else estimate(lam_critic)[1]", "advantages, returns"),
        ("args.lam if args.lam_policy is None else args.lam_policy", "args.lam"),
        ("args.lam if args.lam_critic is None else args.lam_critic", "args.lam"),
    ],
    ("datasets.py", "tests/training/test_hooks.py::test_a_resumed_pass_has_the_same_order"): [
        ("skip_first_batches(self.loader, num_skipped)", "skip_first_batches(self.loader, num_skipped - 1)"),
    ],
    (
        "datasets.py",
        "tests/training/test_hooks.py::test_each_pass_has_an_order_of_its_own_that_the_seed_alone_decides",
    ): [
        ("isolated_rng(seed + epoch,", "isolated_rng(seed,"),
        ("with data_order(self.args, epoch):", "with data_order(self.args):"),
        ("with data_order(self.args, epoch):", "if True:"),
        ("args.seed if args.data_seed is None else args.data_seed", "args.seed"),
        ("loader.set_epoch(epoch)", "cast(Any, loader).set_epoch(0)"),
    ],
    ("datasets.py", "tests/training/test_hooks.py::test_episodes_epochs_and_tokens_are_counted"): [
        ("math.ceil(num_updates / per_epoch)", "num_updates // per_epoch"),
    ],
    ("rollouts.py", "tests/training/test_hooks.py::test_episodes_epochs_and_tokens_are_counted"): [
        ('if counted == "non_padding" else', 'if counted == "all" else'),
        ('if counted != "no":', "if True:"),
    ],
    (
        "optimization.py",
        "tests/training/test_optimization.py::test_a_longer_run_has_the_schedule_of_its_length_and_its_rate",
    ): [
        ("settings.put_in_force(changed, num_updates)", "pass"),
        ('num_total_batches": num_updates', 'num_total_batches": 0'),
    ],
    (
        "optimization.py",
        "tests/training/test_optimization.py::test_a_subclass_whose_optimizer_lacks_parameters_is_stopped_before_the_first_update",
    ): [
        ("if not is_sharding and not layer_by_layer:", "if False:"),
    ],
    ("optimization.py", "tests/training/test_optimization.py::test_an_optimizer_without_the_value_model_is_refused"): [
        ("if optimizer is not None:\n            check_covers(optimizer, model)", ""),
        ("if id(parameter) not in held", "if id(parameter) in held"),
    ],
    (
        "optimization.py",
        "tests/training/test_critic_warmup.py::test_deepspeed_holds_the_policys_groups_by_the_numbers_that_it_gives_them",
    ): [
        ('(group for group in optimizer.param_groups if group["params"])', "(optimizer.param_groups)"),
    ],
    ("optimization.py", "tests/training/test_optimization.py::test_what_is_frozen_on_purpose_need_not_be_held"): [
        ("        if parameter.requires_grad\n", ""),
    ],
    ("optimization.py", "tests/training/test_optimization.py"): [
        ("for _ in range(num_steps):", "for _ in range(num_steps - 1):"),
        ("pair[0] != pair[1]", "pair[0] == pair[1]"),
        ("* new / old", "* old / new"),
        ('group["lr"].fill_(float(rate))', 'group["lr"] = rate'),
        ('group["initial_lr"] = copy.deepcopy(own["initial_lr"])', "pass"),
        ('not name.startswith("_") and name not in counted', "True"),
    ],
    ("learning.py", "tests/training/test_hooks.py::test_gradients_are_exchanged_with_the_last_micro_batch_only"): [
        ("if is_last or", "if True or"),
        ("if is_last or", "if not is_last or"),
    ],
}
