"""Mutants of the room `rewards`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("functions.py", "tests/agents/test_episodes.py"): [
        ("rewards[row, end - 1] += reward", "rewards[row, end - 2] += reward"),
    ],
    (
        "scorer.py",
        "tests/rewards/test_shaping.py::test_before_the_first_update_an_evaluation_takes_the_moments_of_its_own_scores",
    ): [("total = scores + token_scores", "total = scores")],
    ("judges.py", "tests/rewards/test_judges.py"): [
        ("float(second > first)", "float(second < first)"),
        ("0.5 if first == second else float(second > first)", "float(second > first)"),
        ("min(first - second, 700.0)", "min(second - first, 700.0)"),
        ("None if first is None or second is None else self.verdict", "None if first is None else self.verdict"),
        ("(1 - max(-1.0, min(1.0, value))) / 2", "(1 + max(-1.0, min(1.0, value))) / 2"),
    ],
    ("judges.py", "tests/rewards/test_judges_preference.py"): [
        ("second - first", "first - second"),
        ("second - first", "1 - 2 * first"),
        ("[(other, one) for one, other in chosen]", "[(one, other) for one, other in chosen]"),
        ("is None or second is None else second - first", "is None else second - first"),
        ("found[row] = Compared(0.5, 0.5)", "pass"),
        ("number == -1", "number == -2"),
        ("shuffle_order=False", "shuffle_order=True"),
        ("(1 + sum(scored) / len(scored)) / 2", "sum(scored) / len(scored)"),
    ],
    ("scorer.py", "tests/rewards/test_scorer.py::test_rewards_per_token_are_added_token_by_token_beside_the_scores"): [
        ("per_token + self.weights[name] * scores", "per_token + scores"),
        ("torch.where(mask & ~unscored[:, None], scores, 0.0)", "torch.where(~unscored[:, None], scores, 0.0)"),
    ],
    (
        "scorer.py",
        "tests/rewards/test_scorer.py::test_total_is_the_weighted_sum_over_the_sources_that_scored_the_row",
    ): [
        ("final + self.weights[name] * torch.where", "final + torch.where"),
    ],
    ("scorer.py", "tests/rewards/test_shaping.py::test_an_evaluation_s_scores_keep_the_reward_s_unit"): [
        ("_mean(args, unit) + unit.std * _shaped(", "_mean(args, unit) + _shaped("),
        ("_mean(args, unit) + unit.std * _shaped(", "unit.std * _shaped("),
    ],
    ("scorer.py", "tests/rewards/test_shaping.py::test_the_order_by_hand"): [
        ("clip_scores(scores, args.score_clip)", "scores"),
        ("(scores - _mean(args, unit)) / unit.std", "scores / unit.std"),
        ("(scores - _mean(args, unit)) / unit.std", "scores - _mean(args, unit)"),
        ("_of_tokens(rollout) / std", "_of_tokens(rollout)"),
    ],
}
