"""What is broken in the room `processes`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    (
        "random_numbers.py",
        (
            "tests/processes/test_random_numbers.py "
            "tests/data/test_experience.py::test_the_order_is_a_function_of_seed_update_and_rank"
        ),
    ): [
        ("set_seed(seed, device_specific=device_specific)", "set_seed(0, device_specific=device_specific)"),
        ("set_seed(seed, device_specific=device_specific)", "set_seed(seed)"),
        ("with rng_kept():", "if True:"),
        ("random.setstate(python_state)", "pass"),
        ("np.random.set_state(numpy_state)", "pass"),
        ("with torch.random.fork_rng(devices=devices):", "if True:"),
        ("states = [torch.get_rng_state()]", "states = [torch.rand(1)]"),
        ("digest.update(state.numpy().tobytes())", "pass"),
        ("hashlib.blake2b(label.encode(), digest_size=4)", "hashlib.blake2b(digest_size=4)"),
        ("repr((label, *words))", "repr(words)"),
        ("repr((label, *words))", 'label + "".join(map(str, words))'),
        ("SeedSequence([seed, update, rank])", "SeedSequence([seed, update])"),
        ("SeedSequence([seed, update, rank])", "SeedSequence([seed + update + rank])"),
    ],
    (
        "streams.py",
        "tests/processes/test_streams.py::test_a_stream_goes_on_where_it_was_and_leaves_the_others_alone",
    ): [
        ("_put_in_place(of_training)", "pass"),
        ("self._states = _current(", "_current("),
        ("_put_in_place(self._states)", "pass"),
        ("self._states = kept", "pass"),
        ("seed_of(self.label, *words)", "seed_of(self.label)"),
        ("self._states = {**known,", "known = {**known,"),
    ],
}
