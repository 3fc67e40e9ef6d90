"""`examples/vision.py`: its questions, its reward, and the script at the size of a toy."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from examples.vision import COLORS, PLACES, SIZE, WORDINGS, correct, make_policy, row
from tests.examples.test_ppo_example import Run, run

__all__ = ["run"]


def test_the_answer_is_the_color_of_the_corner_in_the_image() -> None:
    dice, half = random.Random(0), SIZE // 2
    for is_held_out in [False, True] * 20:
        asked = row(is_held_out, dice)
        text, (image,) = asked["prompt"][0]["content"], asked["images"]
        assert any(text.startswith(WORDINGS[-1].format(place)) for place in PLACES) == is_held_out
        ((left, top),) = [(n % 2 * half, n // 2 * half) for n, corner in enumerate(PLACES) if corner in text]
        colors = image.crop((left, top, left + half, top + half)).getcolors()
        (_, seen), *_ = sorted([color for color in colors if color[1] != (255, 255, 255)], reverse=True)
        assert "#{:02x}{:02x}{:02x}".format(*seen) == COLORS[asked["answer"]]
        said = [[{"content": word}] for word in (asked["answer"], f"{asked['answer'].title()}.", "none")]
        assert correct(said, [asked["answer"]] * 3, ["own"] * 3, lambda *_: None) == [1, 1, 0]


@pytest.mark.slow
def test_the_script(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for part in make_policy([row(False, random.Random(0)) for _ in range(8)], 0, steps=1):
        part.save_pretrained("made")
    options = "--max_steps 1 --per_device_train_batch_size 8 --use_cpu --bf16 False --report_to none"
    trainer = run(f"--model_name_or_path made --output_dir out {options}", script="vision.py")
    assert trainer.state.global_step == 1 and Path("out/processor_config.json").is_file()
    shown = capsys.readouterr().out
    assert "Accuracy before: {'other': 0." in shown and "Accuracy after: {'other': 0." in shown
    assert type(trainer.policy_model).from_pretrained("out")
