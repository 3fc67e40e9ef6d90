"""Mutants of the room `checkpoints`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("run.py", "tests/faults/test_history.py::test_checkpoints_hold_the_end_of_the_log_and_the_file_all"): [
        ("logged[self.num_written :]", "logged[self.num_written - 1 :]"),
        ("self.num_written += len(entries)", "self.num_written += 1"),
    ],
}
