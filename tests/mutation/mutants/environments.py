"""Mutants of the room `environments`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("pool.py", "tests/environments/test_pool.py"): [
        ("key=lambda number: (number in ran_later, number)", "key=lambda number: number"),
        ("turn_reward=sum(rewards)", "turn_reward=0.0"),
        ('done=report.get("done", False)', "done=False"),
        ('row["seed"] = seeds[episode.row]', 'row["seed"] = seeds[0]'),
        ("copy.deepcopy(row)", "row"),
    ],
    ("tools.py", "tests/environments/test_pool.py"): [
        ("new, self._paid = listed[self._paid :], len(listed)", "new, self._paid = listed, len(listed)"),
    ],
}
