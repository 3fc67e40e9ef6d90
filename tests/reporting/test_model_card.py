import os

import pytest
from huggingface_hub import ModelCard

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.reporting.judgements import Judgement
from rlhf_ppo.reporting.model_card import final_metrics, hyperparameters, model_card, with_judgements

VALUES = {
    "model_name": "tldr-ppo",
    "base_model": "EleutherAI/pythia-160m",
    "dataset": "trl-lib/tldr",
    "reward_sources": ["some-org/reward", "length_bonus"],
    "hyperparameters": {"kl_coef": 0.05, "learning_rate": 3e-06},
    "metrics": {"objective/scores": 1.23456, "objective/kl": 0.5},
    "versions": {"transformers": "5.17.0"},
}


@pytest.fixture
def saved(tmp_path):
    """A function that makes a card, writes it as README.md and reads it back as the hub does."""

    def write_and_load(**changes):
        model_card(**{**VALUES, **changes}).save(tmp_path / "README.md")
        return ModelCard.load(tmp_path / "README.md")

    return write_and_load


def test_the_text_names_everything_that_made_the_model(saved):
    text = saved().text

    for name in ("tldr-ppo", "EleutherAI/pythia-160m", "trl-lib/tldr", "`some-org/reward`", "`length_bonus`"):
        assert name in text
    for row in ("| kl_coef | 0.05 |", "| learning_rate | 3e-06 |", "| objective/scores | 1.235 |"):
        assert row in text
    assert "| transformers | 5.17.0 |" in text
    for paper in ("1707.06347", "2403.17031", "1909.08593"):
        assert f"arXiv:{paper}" in text


FIRST, SECOND = (Judgement(rate, (0.5, 0.75), 98, "sft", "gpt-4o-mini") for rate in (0.625, 0.75))


def test_what_judges_find_later_is_where_a_card_written_then_has_it():
    earlier, later = (str(model_card(**VALUES, judgements=found)) for found in ([], [FIRST, SECOND]))

    assert with_judgements(earlier, [FIRST, SECOND]) == later
    assert with_judgements(with_judgements(earlier, [FIRST]), [FIRST, SECOND]) == later
    assert with_judgements(later, [FIRST]).count("Win rate") == 1 and with_judgements(earlier, []) == earlier


def test_what_people_have_written_into_a_card_stays():
    card = str(model_card(**VALUES, judgements=[FIRST]))
    theirs = (
        card.replace("## Final metrics", "## Use\n\nNot for `x`: \\1.\n\n## Final metrics") + "\n## Thanks\n\nAll.\n"
    )

    assert with_judgements(theirs, [SECOND]) == theirs.replace("62.50%", "75.00%")
    assert with_judgements("# My own card\n", [FIRST]) == "# My own card\n"


def test_local_paths_stay_private(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "sft").mkdir(parents=True)

    card = saved(
        base_model="models/sft",
        dataset=str(tmp_path / "prompts.jsonl"),
        reward_sources=[os.path.join(tmp_path, "secret", "rm", "")],
    )

    assert card.data.base_model is None
    assert card.data.get("datasets") is None
    assert "`sft`" in card.text and "`prompts.jsonl`" in card.text and "- `rm`" in card.text
    assert "secret" not in card.text and str(tmp_path) not in card.text


def test_final_metrics_are_the_last_logged_of_each_without_timings():
    log = [
        {"step": 1, "epoch": 0.5, "objective/kl": 0.1, "loss/value_avg": 2.0, "time/rollout": 3.0, "lr": 1e-6},
        {"step": 1, "eval_objective/scores": 0.4, "eval_runtime": 1.0, "eval_samples_per_second": 2.0},
        {"step": 2, "epoch": 1.0, "objective/kl": 0.2},
        {"step": 2, "train_runtime": 9.0},
    ]

    found = final_metrics(log)

    assert list(found.items()) == [("eval_objective/scores", 0.4), ("loss/value_avg", 2.0), ("objective/kl", 0.2)]


def test_hyperparameters_are_those_of_the_configuration(tmp_path):
    found = hyperparameters(PPOConfig(output_dir=str(tmp_path), kl_coef=0.125, seed=7, lr_scheduler_type="cosine"))

    assert found["kl_coef"] == 0.125 and found["seed"] == 7 and found["num_ppo_epochs"] == 4
    assert found["lr_scheduler_type"] == "cosine"  # the word, not the enumeration's repr
    assert "missing_eos_penalty" not in found and "stop_token_id" not in found
