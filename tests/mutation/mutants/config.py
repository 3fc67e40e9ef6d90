"""Mutants of the room `config`."""

MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("ppo_config.py", "tests/config/test_sizes.py"): [
        ("batch // self.num_mini_batches", "local // self.num_mini_batches"),
        ("check_num_prompts(num_examples, batch,", "check_num_prompts(num_examples, local,"),
        ("num_prompts * num_generations < batch_size", "num_prompts * num_generations <= batch_size"),
        ("local % number:", "per_device % number:"),
        ("math.ceil(total_episodes / batch_size), ", "total_episodes // batch_size, "),
        ("total_episodes or max_steps * batch_size", "max_steps * batch_size"),
        ("max(1, int(num_train_epochs * (episodes_of_pass or 0)))", "int(num_train_epochs * (episodes_of_pass or 0))"),
    ],
    ("validation.py", "tests/config/test_validation.py::test_ranges"): [
        ("value > self.low if self.open_low else value >= self.low", "value >= self.low"),
        ("value < self.high if self.open_high else value <= self.high", "value <= self.high"),
    ],
}
