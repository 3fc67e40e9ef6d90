"""Mutants of the room `processes`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    (
        "distributed.py",
        (
            "tests/processes/test_distributed.py "
            "tests/data/test_experience.py::test_the_order_is_a_function_of_seed_update_and_rank"
        ),
    ): [
        ("set_seed(seed, device_specific=device_specific)", "set_seed(0, device_specific=device_specific)"),
        ("set_seed(seed, device_specific=device_specific)", "set_seed(seed)"),
        ("with preserve_rng():", "if True:"),
        ('random.setstate(states["python"])', "pass"),
        ('np.random.set_state(states["numpy"])', "pass"),
        ('torch.set_rng_state(states["cpu"])', "pass"),
        ("states = [torch.get_rng_state()]", "states = [torch.rand(1)]"),
        ("digest.update(state.numpy().tobytes())", "pass"),
        ("hashlib.blake2b(label.encode(), digest_size=4)", "hashlib.blake2b(digest_size=4)"),
        ("repr((label, *words))", "repr(words)"),
        ("repr((label, *words))", 'label + "".join(map(str, words))'),
        ("SeedSequence([seed, update, rank])", "SeedSequence([seed, update])"),
        ("SeedSequence([seed, update, rank])", "SeedSequence([seed + update + rank])"),
    ],
    (
        "distributed.py",
        "tests/processes/test_distributed.py::test_a_stream_goes_on_where_it_was_and_leaves_the_others_alone",
    ): [
        ("_set_rng_states(of_training)", "pass"),
        ("self._states = _rng_states()", "_rng_states()"),
        ("_set_rng_states(self._states)", "pass"),
        ("self._states = states", "pass"),
        ("derive_seed(self.label, *words)", "derive_seed(self.label)"),
        ("self._states = {**known,", "known = {**known,"),
    ],
}
