"""Mutants of the room `generation`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("episodes.py", "tests/agents/test_episodes.py"): [
        ("record.extend(ids, False)", "record.extend(ids, True)"),
        ("ended=torch.tensor([record.ended for record in records], device=device)", "ended=None"),
    ],
    ("caches.py", "tests/agents/test_kept_caches.py"): [
        ("row[:, : max(columns - start, 0)]", "row[:, -max(columns - start, 0) :]"),
        ("if number > fewest:", "if number > fewest + 1:"),
    ],
    ("caches.py", "tests/generation/test_cache.py::test_layers_return_and_keep_what_transformers_do"): [
        ("value_states, self.sliding_window - 1)", "value_states, self.sliding_window)"),
        ("max(self.start, self.end - num_last)", "self.end - num_last"),
        ("memory[..., :num_kept, :].copy_(kept)", "pass"),
    ],
    ("sampling.py", "tests/generation/test_sampling.py::test_by_hand"): [
        ("drawn = torch.rand_like(total) * total", "drawn = torch.rand_like(total) ** 2 * total"),
        ("right=True)", "right=False)"),
        ("torch.minimum(drawn, total.nextafter(total * 0))", "drawn"),
    ],
    ("sampling.py", "tests/generation/test_sampling.py::test_top_p_by_hand"): [
        ("is_unlikely[:, -1] = False", "pass"),
    ],
    ("sampling.py", "tests/generation/test_sampling.py::test_what_stays_is_what_transformers_keeps"): [
        ("<= round((1 - self.top_p) * _UNIT)", "<= round(self.top_p * _UNIT)"),
        ("tokens.argsort(dim=-1)", "tokens"),
    ],
    ("protocol.py", "tests/generation/test_protocol.py"): [
        ("~is_stop.any(dim=1) & (lengths < most)", "~is_stop.any(dim=1) & (lengths < 0)"),
        ("torch.isin(ids, stops) & sampled", "torch.isin(ids, stops)"),
        ("is_real & ~values.isfinite()", "is_real & values.isnan()"),
        ("is_real & ((ids < 0) |", "is_real & ((ids < -9) |"),
        ("sampled & (is_stop.cumsum(dim=1) - is_stop.long() == 0)", "sampled"),
    ],
    (
        "sampling.py",
        "tests/generation/test_sequences.py::test_joined_rows_have_their_masks_and_no_column_that_nobody_reaches",
    ): [
        ("int(written.sum(axis=1).max())", "int(written.sum(axis=1).min())"),
    ],
    ("sampling.py", "tests/generation/test_sequences.py::test_the_mask_ends_with_the_first_stop_token"): [
        ("stops.cumsum(dim=1) - stops == 0", "stops.cumsum(dim=1) == 0"),
        ("stops.cumsum(dim=1) - stops == 0", "stops.cumsum(dim=0) - stops == 0"),
    ],
    ("sampling.py", "tests/generation/test_stopping.py"): [
        ("input_ids[:, self.prompt_length :].tolist()", "input_ids.tolist()"),
        ("self.is_in(ids[-self.num_tail_tokens :]) and self.is_in(ids)", "self.is_in(ids[-6:])"),
        ("self.is_in(ids[-self.num_tail_tokens :]) and self.is_in(ids)", "self.is_in(ids[1:])"),
        ("max(len(text.encode()) for text in self.strings) + _CONTEXT", "1 + _CONTEXT"),
        ("range(1, len(ids) + 1)", "range(1, len(ids))"),
        ("any(string in str(text)", "all(string in str(text)"),
        ("skip_special_tokens=False", "skip_special_tokens=True"),
        ("< lengths[:, None]", "<= lengths[:, None]"),
        ("width if end is None else end", "0 if end is None else end"),
    ],
}
