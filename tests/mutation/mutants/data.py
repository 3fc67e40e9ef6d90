"""Mutants of the room `data`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("prompts.py", "tests/models/test_capabilities.py::test_runs_that_may_cross_it_are_refused_at_construction"): [
        ("total > limit.tokens", "total >= limit.tokens"),
        ("room = limit.tokens - response_length", "room = limit.tokens"),
    ],
    (
        "prompts.py",
        "tests/models/test_capabilities.py::test_up_to_the_limit_rows_do_not_depend_on_each_other_and_beyond_it_they_do",
    ): [
        ("return min((limit", "return max((limit"),
    ],
    ("rollout.py", "tests/data/test_gaps.py::test_an_update_equals_numpy"): [
        ("_falls(prompt)", "_falls(~prompt)"),
        ("_falls(~response)", "_falls(response)"),
        ("written & ~response", "written & response"),
        ("~prompt[:, -1]", "~prompt[:, 0]"),
        ("~written.any(axis=1)", "~written.all(axis=1)"),
    ],
    ("rollout.py", "tests/data/test_places.py::test_places_are_those_of_each_real_token"): [
        ("np.arange(len(rows)) - (ends - lengths)[rows]", "np.arange(len(rows)) - ends[rows]"),
        ("rows * longest + positions", "rows * width + positions"),
        ("+ (width - length),", ","),
        ("response_rows * length + response_columns", "response_rows * width + response_columns"),
        ("np.concatenate([[0], ends])", "np.concatenate([ends, [0]])"),
    ],
    (
        "rollout.py",
        "tests/data/test_experience.py::test_parts_hold_every_real_token_once_in_order_without_common_padding",
    ): [
        ("attention[:, context:].any(axis=0).sum()", "attention[:, context:].all(axis=0).sum()"),
    ],
}
