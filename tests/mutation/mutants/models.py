"""Mutants of the room `models`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("heads.py", "tests/training/test_value_heads.py"): [
        ("outputs.softmax(-1) @", "outputs @"),
        ("low + width * (index + 0.5)", "low + width * index"),
        ("if not is_new and low <= first else", "if low <= first else"),
        ("saved.write_to(transformers_model(model).config)", "pass"),
        ("min(first, low)", "first"),
        ("has_fixed_range and own.centers != wanted.centers", "False"),
        ("nn.init.zeros_(parameter)", "pass"),
    ],
    ("heads.py", "tests/training/test_critic_ensemble.py"): [
        ("values.mean(-1), logits, values", "values[..., 0], logits, values"),
        (":, own]", ":, own * 0]"),
        ("config.value_heads = self.num_heads", "config.own_heads = self.num_heads"),
        ("if own.num_bins == wanted.num_bins:\n        replace_head", "if False:\n        replace_head"),
        ("if own.num_heads not in (1, wanted.num_heads):", "if False:"),
    ],
    ("heads.py", "tests/training/test_critic_warmup.py"): [
        ("parameter.requires_grad_(False)", "pass"),
        ("id(each) in of_policy), None)", "False), None)"),
    ],
    ("fused.py", "tests/models/test_fused.py::test_values_and_gradients_are_those_of_whole_logits_in_float64"): [
        (
            "linear = self.factor / self.temperature\n            return",
            "linear = self.factor * self.temperature\n            return",
        ),
        ("return at_target - log_total, entropy", "return at_target + log_total, entropy"),
        ("self.total.log() - self.weighted / self.total", "self.total.log() + self.weighted / self.total"),
    ],
    ("fused.py", "tests/models/test_heads.py::test_logprobs_and_gradients_are_those_of_float64"): [
        ("torch.float32 if head.in_float32 else", "torch.bfloat16 if head.in_float32 else"),
    ],
    (
        "reference.py",
        "tests/models/test_ema_reference.py::test_after_each_update_it_is_the_recursion_over_the_policies",
    ): [
        (".to(exact), 1 - self.decay)", ".to(exact), self.decay)"),
    ],
    (
        "reference.py",
        "tests/models/test_ema_reference.py::test_small_steps_are_not_lost_beside_weights_in_16_bits",
    ): [
        ("self._exact.setdefault(pair.name, share.float())", "share.float()"),
    ],
    ("heads.py", "tests/models/test_heads.py::test_the_score_is_what_the_model_itself_says_of_the_unpadded_row"): [
        ("mask.shape[1] - 1 - mask.flip(1)", "mask.shape[1] - mask.flip(1)"),
        ("mask.flip(1).to(torch.int8).argmax(dim=1)", "mask.to(torch.int8).argmax(dim=1)"),
    ],
    ("heads.py", "tests/models/test_heads.py::test_values_are_the_head_on_each_state_counted_from_the_right"): [
        (")[:, -last:]", ")[:, :last]"),
    ],
    (
        "policy_and_value.py",
        "tests/models/test_logprobs.py::test_logprobs_and_entropy_are_those_of_the_models_own_logits",
    ): [
        ("index_select(0, tokens - 1)", "index_select(0, tokens)"),
        ("zeros.index_copy(0, places.responses, each)", "zeros.index_copy(0, places.responses, -each)"),
    ],
    ("policy_and_value.py", "tests/models/test_logprobs.py::test_without_entropy_the_logprobs_are_the_same"): [
        ("policy, states) / temperature)", "policy, states) * temperature)"),
    ],
    ("packing.py", "tests/models/test_packing.py::test_states_and_gradients_are_those_of_each_row_alone"): [
        ("distance < sliding_window", "distance <= sliding_window"),
        ("(distance >= 0) &", ""),
    ],
    (
        "capabilities.py",
        "tests/models/test_capabilities.py::test_up_to_the_limit_rows_do_not_depend_on_each_other_and_beyond_it_they_do",
    ): [
        ('or "dynamic" in kind', 'and "dynamic" in kind'),
        (
            'parameters.get("original_max_position_embeddings") or config.max_position_embeddings',
            "config.max_position_embeddings",
        ),
    ],
}
