"""Value models trained on kept completions: their targets, their loss, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, TrainingArguments

from rlhf_ppo.cli.critic import CriticTrainer, collate, examples_of, train_critic
from rlhf_ppo.cli.main import main
from rlhf_ppo.models.heads import ValueHead
from rlhf_ppo.models.loading import load_value_model
from rlhf_ppo.models.unwrapping import transformers_model
from tests.conftest import make_tokenizer, tiny_scorer
from tests.runs import QUICK, record, record_rollouts

KEEPS = {**QUICK, "num_completions_to_keep": 8, "logging_steps": 1}


@pytest.fixture
def run(make_trainer: Any) -> tuple[Any, list[Any]]:
    trainer = make_trainer(**KEEPS)
    rollouts, estimates = record_rollouts(trainer), record(trainer, "compute_advantages")
    trainer.train()
    return trainer, [(rollout, returns) for rollout, (_, returns) in zip(rollouts, estimates, strict=True)]


def test_examples_have_the_returns_that_the_run_trained_its_critic_on(run: Any) -> None:
    trainer, updates = run
    examples = iter(examples_of([trainer.args.output_dir], trainer.args.gamma, trainer.args.lam))
    for rollout, returns in updates:
        for row in range(min(8, len(rollout))):
            example, real = next(examples), rollout.attention_mask[row]
            ids = rollout.query_responses[row]
            assert example["prompt_id"] + example["token_id"] == ids[real].tolist()
            mask = rollout.response_mask[row]
            np.testing.assert_allclose(example["returns"], returns[row][mask], rtol=1e-4, atol=1e-5)
    assert next(examples, None) is None


def test_collated_rows_and_the_loss_by_hand(tmp_path: Path) -> None:
    rows = [
        {"prompt_id": [4, 5], "token_id": [6, 7, 1], "token_written": [True, False, True], "returns": [1.0, 0.0, 3.0]},
        {"prompt_id": [8], "token_id": [9], "token_written": [True], "returns": [-1.0]},
    ]
    rows = [{"number": number} | row for number, row in enumerate(rows)]
    batch = collate(rows)
    assert batch["query_responses"].tolist() == [[4, 5, 6, 7, 1], [0, 8, 9, 0, 0]]
    assert batch["attention_mask"].tolist() == [[True] * 5, [False, True, True, False, False]]
    assert batch["response_mask"].tolist() == [[True, False, True], [True, False, False]]
    scorer = tiny_scorer()
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    loss = CriticTrainer(scorer, args, rows).compute_loss(scorer, batch)
    with torch.no_grad():  # the value before a token is the score of the text up to the token before it
        values = [float(scorer(input_ids=torch.tensor([ids])).logits) for ids in ([4, 5], [4, 5, 6, 7], [8])]
    expected = np.mean([0.5 * (value - target) ** 2 for value, target in zip(values, (1.0, 3.0, -1.0), strict=True)])
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("head", [ValueHead(), ValueHead.with_bins(5, -1, 1, num_heads=2)])
def test_the_command_keeps_the_best_epoch_of_a_critic_that_a_run_takes(
    run: Any, tmp_path: Path, make_trainer: Any, head: ValueHead
) -> None:
    start, fitted = tmp_path / "start", tmp_path / "critic"
    start_of(start, head)
    words = ["--completions", run[0].args.output_dir, "--model_name_or_path", str(start), "--output_dir", str(fitted)]
    words += ["--learning_rate", "5e-2", "--num_train_epochs", "30", "--eval_share", "0.3", "--lam", "1"]
    trainer = train_critic([*words, "--report_to", "none", "--use_cpu"])
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 30 and min(losses) < losses[-1]  # it overfits
    saved = AutoModelForSequenceClassification.from_pretrained(fitted)
    args = TrainingArguments(str(tmp_path / "unused"), report_to="none", use_cpu=True)
    held_out: Any = trainer.eval_dataset
    assert CriticTrainer(saved, args, held_out, held_out).evaluate()["eval_loss"] == pytest.approx(min(losses))
    said = {"critic_ensemble": head.num_heads}
    said |= {"value_loss": "hl_gauss", "value_bins": 5} if head.centers else {}
    make_trainer(**KEEPS | said, value_model=str(fitted), output_dir=str(tmp_path / "again")).train()


def test_values_in_another_unit_than_the_rewards_make_no_targets(make_trainer: Any) -> None:
    trainer = make_trainer(**KEEPS, whiten_rewards=True)
    trainer.train()
    with pytest.raises(ValueError, match=r"lam=0.95: .* \(whiten_rewards=True\)"):
        examples_of([trainer.args.output_dir])
    assert examples_of([trainer.args.output_dir], lam=1.0)


def start_of(directory: Path, head: ValueHead) -> Path:
    """Save a value model with this head."""
    scorer = tiny_scorer(num_labels=head.num_outputs)
    head.write_to(scorer.config)
    scorer.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("head", [ValueHead(), ValueHead.with_bins(5, -1, 1, num_heads=2)])
def test_the_command_trains_an_adapter_whose_critic_loads_again(run: Any, tmp_path: Path, head: ValueHead) -> None:
    words = ["--completions", run[0].args.output_dir, "--model_name_or_path", str(start_of(tmp_path / "start", head))]
    words += ["--output_dir", str(tmp_path / "critic"), "--eval_share", "0.3", "--learning_rate", "1e-2"]
    words += ["--use_peft", "--lora_target_modules", "all-linear", "--report_to", "none", "--use_cpu"]
    trainer: Any = train_critic([*words, "--attn_implementation", "eager"])
    assert transformers_model(trainer.model).config._attn_implementation == "eager"
    assert (tmp_path / "critic" / "adapter_config.json").is_file()
    saved, held_out = load_value_model(str(tmp_path / "critic"), "critic"), trainer.eval_dataset
    args = TrainingArguments(str(tmp_path / "unused"), report_to="none", use_cpu=True)
    found = CriticTrainer(saved, args, held_out, held_out).evaluate()["eval_loss"]
    assert found == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-4)


def test_the_command_continues_from_a_checkpoint(run: Any, tmp_path: Path) -> None:
    words = ["--completions", run[0].args.output_dir, "--eval_share", "0.3", "--learning_rate", "1e-2", "--use_cpu"]
    words += ["--model_name_or_path", str(start_of(tmp_path / "start", ValueHead())), "--report_to", "none"]
    words += ["--save_only_model", "False", "--save_strategy", "epoch", "--save_total_limit", "9"]
    whole: Any = train_critic([*words, "--output_dir", str(tmp_path / "critic")])
    first, *_ = sorted((tmp_path / "critic").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    again: Any = train_critic(
        [*words, "--output_dir", str(tmp_path / "again"), "--resume_from_checkpoint", str(first)]
    )
    assert [entry.get("eval_loss") for entry in again.state.log_history[:-1]] == [
        entry.get("eval_loss") for entry in whole.state.log_history[:-1]
    ]
    assert again.state.global_step == whole.state.global_step
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit"], "fit is not the output directory of a run"),
        (["train", "--output_dir", "out"], "completions=None"),
        (["train", "--output_dir", "out", "--completions", "nowhere"], "model_name_or_path=None"),
        (["train", "--output_dir", "out", "--completions", "nowhere", "--eval_share", "2"], "eval_share=2"),
        (["train", "--output_dir", "out", "--label_smoothing_factor", "0.1"], "label_smoothing_factor=0.1"),
        (["train", "--output_dir", "out", "--learning_rate", "nan"], "learning_rate=nan"),
        (["train", "--output_dir", "out", "--report_to", "nobody"], "report_to=['nobody'] must be"),
        (["train", "--output_dir", "out", "--resume_from_checkpoint", "True"], "save_only_model=False"),
    ],
)
def test_mistakes_at_the_command_line(words: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as error:
        main(["critic", *words])
    assert error.value.code == 2 and message in capsys.readouterr().err
