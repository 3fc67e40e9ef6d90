"""Mutants of the room `estimate`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    (
        "update.py",
        "tests/estimate/test_counting.py::test_a_sharded_pass_holds_a_block_and_the_next_beside_what_is_outside",
    ): [
        ("+ 2 * max(blocks, default=0)", "+ max(blocks, default=0)"),
        ("- sum(blocks)", "- min(blocks, default=0)"),
    ],
    ("update.py", "tests/estimate/test_update.py::test_arithmetic_by_hand"): [
        ("-(-self.rows // self.rows_per_call)", "(self.rows // self.rows_per_call)"),
    ],
    ("update.py", "tests/estimate/test_update.py::test_memory_grows_with_what_it_is_for"): [
        ("self.generated_row * min(self.rows_per_call, self.rows)", "self.generated_row * self.rows_per_call"),
    ],
}
