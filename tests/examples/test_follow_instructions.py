"""`examples/follow_instructions.py`: what its rewards verify, and the script at the size of a toy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from examples.follow_instructions import HELD_OUT_PAIRS, PAIRS, WORDINGS, WORDS, partial, questions, row, strict
from tests.conftest import write_rows
from tests.examples.test_ppo_example import Run, run
from tests.examples.test_training_examples import chat_model

__all__ = ["run"]


def scores(answer: str, *constraints: str, question: str = "Describe rivers.") -> tuple[float, float]:
    asked = row(question, constraints, 0, "golden")
    columns: dict[str, Any] = {f"{key}s" if key == "prompt" else key: [value] for key, value in asked.items()}
    columns["completions"] = [[{"role": "assistant", "content": answer}]]
    return strict(lambda *_: None, **columns)[0], partial(**columns)[0]


@pytest.mark.parametrize(
    ("answer", "constraints", "expected"),
    [
        ("A river carries water to the sea.", ["short"], (1, 1)),
        ("A river carries a lot of fresh water from the hills to the sea.", ["short"], (0, 8 / 14)),
        ("A river carries water to the sea.", ["lower"], (0, 6 / 7)),
        ("a river carries water to the sea.", ["lower", "short", "no_comma"], (1, 1)),
        ("Wide, deep, and cold: a river.", ["no_comma"], (0, 1 / 3)),
        ("The golden river shines at night.", ["word"], (1, 1)),
        ("The goldenrod by a river shines.", ["word"], (0, 0)),
        ("I think rivers carry water.", ["opening"], (1, 1)),
        ("I love rivers and water.", ["opening", "short"], (0, 3 / 4)),
        ("Have you ever seen a river?", ["question"], (1, 1)),
        ("A river is wet. Have you seen one?", ["question"], (0, 1 / 2)),
        ('"A river carries water."', ["question"], (0, 0)),
        ("A river carries water to the sea.", [], (1, 1)),
    ],
)
def test_the_degree_to_which_an_answer_holds_its_constraints(
    answer: str, constraints: list[str], expected: tuple[float, float]
) -> None:
    assert scores(answer, *constraints) == pytest.approx(expected)


@pytest.mark.parametrize(
    "answer", ["", "Rivers.", "Describe rivers to me.", "I hope this helps.", "A river carries water to"]
)
def test_form_without_an_answer_is_worth_nothing(answer: str) -> None:
    assert scores(answer, "short", "no_comma") == (0, 0)


def test_no_wording_word_or_pair_of_the_test_is_trained_on() -> None:
    assert all(len(set(wordings)) == 3 for wordings in WORDINGS.values()) and len(set(WORDS)) == len(WORDS)
    assert not {*map(frozenset, PAIRS)} & {*map(frozenset, HELD_OUT_PAIRS)}


@pytest.mark.slow
def test_the_script(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat_model(tmp_path / "chat-model")
    write_rows(tmp_path / "asked.jsonl", [{"prompt": "w3 w5"}, {"prompt": {"text": "w7 w9"}}])
    options = (
        "--dataset_name asked.jsonl --output_dir out --per_device_train_batch_size 4 "
        "--save_steps 1 --response_length 5 --per_device_eval_batch_size 176 --report_to none --use_cpu --max_steps"
    )
    trainer = run(f"{options} 1", script="follow_instructions.py")
    assert isinstance(trainer.policy_model, PeftModel) and Path("out/adapter_config.json").is_file()
    trained = {text["question"] for text in trainer.train_dataset}
    tested = {text["question"] for text in trainer.eval_dataset}
    assert not trained & tested and trained | tested == set(questions("asked.jsonl"))
    assert "Strict accuracy before: {'': 0.0, " in capsys.readouterr().out
    with pytest.raises(ValueError, match="holds checkpoints that this run does not continue"):
        run(f"{options} 2", script="follow_instructions.py")
    assert "Strict accuracy" not in capsys.readouterr().out
    again = run(f"{options} 2 --resume_from_checkpoint True", script="follow_instructions.py")
    assert again.state.global_step == 2 and again._initial_global_step == 1
    assert "opening+short" in capsys.readouterr().out.partition("Strict accuracy after:")[2]
