"""Mutants of the room `reporting`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("metrics.py", "tests/training/test_recipes.py::test_epochs_end_once_the_policy_has_moved_far_enough"): [
        ('kl_estimate(part.logprobs, output.logprobs, "k3")', 'kl_estimate(part.logprobs, output.logprobs, "k1")'),
        ('kl_estimate(part.logprobs, output.logprobs, "k3")', 'kl_estimate(output.logprobs, part.logprobs, "k3")'),
        ("torch.stack(self.sums[start:])", "torch.stack(self.sums)"),
    ],
    ("metrics.py", "tests/reporting/test_metrics.py::test_episode_columns_by_hand"): [
        ('"kl": kl.sum(dim=1)', '"kl": kl.mean(dim=1)'),
        ("-zero_outside(rollout.logprobs, rollout.response_mask).sum(dim=1)", "-rollout.logprobs.sum(dim=1)"),
    ],
    ("judgements.py", "tests/reporting/test_judgements.py"): [
        ("ddof=1", "ddof=0"),
        ("/ np.sqrt(count)", "/ count"),
        ("np.mean(self.rates)", "np.median(self.rates[:2])"),
    ],
}
