"""Mutants of the room `evaluation`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("win_rate.py", "tests/evaluation/test_win_rate.py::test_a_tie_counts_half_and_a_failed_verdict_not_at_all"): [
        ("(self.wins + self.ties / 2) / self.judged", "(self.wins + self.ties) / self.judged"),
        ("return self.wins + self.losses + self.ties", "return self.wins + self.losses"),
    ],
    (
        "win_rate.py",
        "tests/evaluation/test_win_rate.py::test_the_orders_agree_where_both_prefer_the_same_response_or_none",
    ): [
        ("np.sign(first) == np.sign(second)", "first == second"),
        ("if first is not None and second is not None]", "if second is not None]"),
    ],
}
