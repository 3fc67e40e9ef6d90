"""Mutants of the room `cli`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("critic.py", "tests/training/test_critic_ensemble.py"): [
        ('inputs["numbers"] % of_heads.shape[-1]', 'inputs["numbers"] * 0'),
    ],
    ("critic.py", "tests/training/test_critic_fitting.py"): [
        ("gae(rewards, values, written, gamma, lam)[1]", "gae(rewards, values, written, gamma, 1.0)[1]"),
        ("losses[mask].mean()", "losses.mean()"),
        ("torch.cat((left_padded(prompts, 0), padded", "torch.cat((padded('token_id', 0), padded"),
    ],
}
