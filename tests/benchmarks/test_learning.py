"""The benchmark of what is learned: a cell from end to end in small, what is left to do, and what the tables say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.mark.thorough
def test_a_small_cell_is_the_same_run_that_plain_options_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import arithmetic
    from cell import Sizes, run_cell

    monkeypatch.setattr(arithmetic, "NUM_STEPS", 2)
    arithmetic.prepare(tmp_path, tmp_path / "arithmetic")
    task = arithmetic.load(tmp_path, tmp_path / "arithmetic")
    task = replace(task, reward=lambda prompts, completions: [float(len(set(text))) for text in completions])
    sizes = Sizes(updates=3, every=1, num_prompts=8, num_final=16)
    cell, same = (
        run_cell(task, variant, 3, sizes, {"per_device_train_batch_size": 8}) for variant in ("plain", "lam_critic=1")
    )
    assert [point["update"] for point in cell["points"]] == [0, 1, 2, 3]
    assert cell["points"][0]["kl"] == 0 < abs(cell["final"]["kl"])
    assert cell["curves"]["step"] == [1, 2, 3] and len(cell["curves"]["objective/scores"]) == cell["num_updates"] == 3
    assert {**cell, "seconds": 0} == {**same, "seconds": 0}, "lam is 1 here anyway; evaluations change nothing"
    assert json.loads(json.dumps(cell)) == cell
    with pytest.raises(ValueError, match="has no texts of its language model"):
        run_cell(task, "ptx_coef", 3, sizes)
    (tmp_path / "texts.jsonl").write_text('{"text": "37+48=58"}\n' * 8)
    task = replace(task, texts=tmp_path / "texts.jsonl")
    of_texts = run_cell(task, "ptx_coef", 3, sizes, {"per_device_train_batch_size": 8})
    assert of_texts["points"][0] == cell["points"][0] and of_texts["points"][1]["kl"] != cell["points"][1]["kl"]


def test_the_kl_of_an_evaluation_is_that_of_the_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import arithmetic
    from evaluation import Evaluator
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(arithmetic, "NUM_STEPS", 2)
    arithmetic.prepare(tmp_path, tmp_path)
    task = arithmetic.load(tmp_path, tmp_path)
    task = replace(task, arguments=task.arguments | {"response_length": 1, "temperature": 0.5})
    policy, reference = (AutoModelForCausalLM.from_pretrained(task.policy).eval() for _ in range(2))
    torch.nn.init.normal_(policy.lm_head.weight, generator=torch.Generator().manual_seed(0))
    found = Evaluator(task, reference, task.judge)(policy, 6)["kl"]

    inputs = task.tokenizer(task.held_out[:6], return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        ours, theirs = ((model(**inputs).logits[:, -1] / 0.5).log_softmax(-1) for model in (policy, reference))
    assert found == pytest.approx(
        torch.nn.functional.kl_div(theirs, ours, reduction="batchmean", log_target=True).item()
    )


def test_a_function_in_the_place_of_trls_reward_model_reads_what_was_answered() -> None:
    import arithmetic
    from libraries import FunctionAsModel

    tokenizer = arithmetic.make_tokenizer()
    model = FunctionAsModel(arithmetic.is_right, tokenizer, ["37+48=", "12+07="])
    answers = ["37+48=58<eos>", "37+48=85<eos>", "12+07=91<eos>", "12+07=9<eos>"]
    inputs = tokenizer(answers, padding=True, return_tensors="pt")
    states = model.read(**inputs).hidden_states[-1]
    assert states.shape == (4, 9, 1)
    torch.testing.assert_close(model.score(states)[..., 0], torch.tensor([1.0, 0, 1, 0])[:, None].expand(4, 9))


def test_rewards_of_stories_pay_for_repetition_and_the_judge_does_not() -> None:
    import hole
    import stories

    valence = {"happy": 2.0, "sad": -1.0}
    texts = ["Happy, happy dog.", "A happy, sad dog.", "A dog."]
    squashed = {total: total / (total**2 + 15) ** 0.5 for total in (4.0, 2.0, 1.0, 0.0)}
    assert stories.vader(valence)([], texts) == pytest.approx([squashed[4.0], squashed[1.0], 0.0])
    assert stories.vader_once(valence)([], texts) == pytest.approx([squashed[2.0], squashed[1.0], 0.0])
    marks = hole.with_hole(stories.vader(valence))([], ["Happy, happy dog!!", "A dog."])
    assert marks == pytest.approx([squashed[4.0] + 0.4, 0.0])


def a_cell(variant: str, seed: int, gold: float) -> dict[str, Any]:
    figures = {"kl": 5.0, "reward": 2 * gold, "unique": 1.0}
    return {
        "task": "stories", "variant": variant, "seed": seed, "seconds": 10.0, "num_updates": 30, "health": {},
        "first": {"gold": 0.25, **figures}, "final": {"gold": gold, **figures},
        "points": [{"update": 0, "gold": 0.25, "kl": 0.0}, {"update": 30, "gold": gold, "kl": 5.0}],
    }  # fmt: skip


def test_gold_at_equal_kl_is_the_distance_of_two_parallel_lines() -> None:
    from report import above_at_equal_kl

    def on_a_line(variant: str, height: float, kls: list[float], noise: float = 0.0) -> list[dict[str, Any]]:
        golds = [height + 0.2 * kl + sign * noise for kl, sign in zip(kls, (1, -1, -1, 1), strict=False)]
        return [
            {**cell, "final": {**cell["final"], "kl": kl}}
            for kl, cell in zip(kls, (a_cell(variant, seed, gold) for seed, gold in enumerate(golds)), strict=True)
        ]

    theirs = on_a_line("trl", 0.1, [1.0, 2.0, 3.0])
    assert above_at_equal_kl(on_a_line("plain", 0.15, [0.5, 1.0, 1.5]), theirs) == "+0.050 [+0.050, +0.050]"
    assert above_at_equal_kl(on_a_line("plain", 0.15, [0.5]), theirs) == "-"
    assert above_at_equal_kl(on_a_line("plain", 0.15, [0.2, 0.5, 0.9]), theirs) == "no overlap"
    assert above_at_equal_kl(on_a_line("plain", 0.15, [3.1, 4.0]), theirs) == "no overlap"
    # Four runs each at the same four KLs, residuals of 0.1 that no line explains: 8 x 0.01 / 5 x (1/4 + 1/4) = 0.008,
    # whose root is 0.089; times 2.571
    noisy = [on_a_line(name, height, [1.0, 2.0, 3.0, 4.0], 0.1) for name, height in (("plain", 0.3), ("trl", 0.1))]
    assert above_at_equal_kl(*noisy) == "+0.200 [-0.030, +0.430]"


def test_runs_that_chose_are_not_among_those_that_report() -> None:
    from report import variants_of

    chose = {**a_cell("plain", 10, 0.9), "purpose": "selection"}
    others = {**a_cell("kl_coef", 10, 0.9), "purpose": "selection"}
    found = variants_of([chose, a_cell("plain", 0, 0.5), others])
    assert {name: [cell["seed"] for cell in group] for name, group in found.items()} == {"plain": [0], "kl_coef": [10]}


def test_intervals_are_student_s() -> None:
    from intervals import mean, share_within, t_of

    table = {1: 12.7062, 2: 4.30265, 4: 2.77645, 10: 2.22814, 19: 2.09302, 100: 1.98397}  # of any textbook
    assert {degrees: t_of(0.95, degrees) for degrees in table} == pytest.approx(table, rel=1e-5)
    assert share_within(2.0, 7) == pytest.approx(1 - 0.0856193, abs=1e-6)
    found = mean([1.0, 2.0, 3.0, 4.0])
    assert found.value == 2.5 and found.half == pytest.approx(3.18245 * (5 / 12) ** 0.5, rel=1e-5)
    assert mean([2.0]).shown() == "2.000"


def test_differences_are_paired_by_seed_or_else_welch_s() -> None:
    from intervals import difference, t_of

    ours, theirs = {0: 1.1, 1: 2.2, 2: 3.0}, {0: 1.0, 1: 2.0, 2: 2.9, 3: 50.0}
    paired = difference(ours, theirs)  # 0.1, 0.2 and 0.1
    assert (paired.how, paired.value) == ("paired", pytest.approx(0.4 / 3))
    assert paired.half == pytest.approx(4.30265 * (0.01 / 3) ** 0.5 / 3**0.5, rel=1e-4)
    apart = difference({10: 1.0, 11: 3.0}, {0: 0.0, 1: 0.0, 2: 3.0})  # variances 2 and 3: 1 + 1
    assert (apart.how, apart.value) == ("Welch", pytest.approx(1.0))
    assert apart.half == pytest.approx(t_of(0.95, 4 / (1 + 1 / 2)) * 2**0.5, rel=1e-4)
    assert difference({0: 1.0}, {0: 0.5}).shown(signed=True) == "+0.500"


def test_each_option_of_the_table_is_one_that_the_configuration_accepts(tmp_path: Path) -> None:
    from variants import OPTIONS

    from rlhf_ppo import PPOConfig

    common: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
    plain = PPOConfig(**common)
    for name, values in OPTIONS.items():
        given = PPOConfig(**common | values)
        assert any(getattr(given, key) != getattr(plain, key) for key in values), name


def test_a_preset_leaves_episodes_learning_rate_and_kl_coefficient_as_they_are() -> None:
    from variants import overrides

    found = overrides("preset:recommended,kl_coef=0.2", learning_rate=2e-6)
    assert found["critic_learning_rate"] == pytest.approx(1e-5) and found["num_mini_batches"] == 2
    assert found["kl_coef"] == 0.2 and "learning_rate" not in found
    assert overrides("cliprange_value=None") == {"cliprange_value": None}
