"""The demonstration, a little smaller than `make demo`: three models, and a judge that prefers PPO's stories."""

import io
import math
import subprocess
import sys

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_ppo.cli.demo import HELD_OUT_SEED, DemoSize, openings, pleasantness, run_demo, tell_stories

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1800)]

SIZE = DemoSize(num_stories=4000, num_pairs=5000, num_updates=20)


TINY = """
from pathlib import Path
from rich.console import Console
from rlhf_ppo.cli.demo import DemoSize
from rlhf_ppo.cli.demo import run_demo
import warnings
warnings.simplefilter("ignore", FutureWarning)  # as the command does
run_demo(Path("demo"), DemoSize(200, 64, num_updates=1, num_episodes=8, num_held_out=8), Console())
"""


def test_no_warning_of_a_library_stands_between_its_lines(tmp_path):
    run = subprocess.run([sys.executable, "-c", TINY], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "Judge prefers PPO over SFT" in run.stdout
    assert [line for line in run.stderr.splitlines() if "Warning" in line or "WARNING" in line] == []
    assert "examples/s" not in run.stderr  # a bar of datasets


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    output_dir, printed = tmp_path_factory.mktemp("demo"), io.StringIO()
    result = run_demo(output_dir, SIZE, Console(file=printed, width=120))
    return output_dir, result, printed.getvalue()


def test_the_judge_prefers_ppo(demo):
    _, result, printed = demo
    verdicts = result.verdicts
    assert verdicts.wins + verdicts.losses + verdicts.ties == SIZE.num_held_out
    assert result.is_clear and verdicts.rate > 0.65
    assert f"Judge prefers PPO over SFT: {verdicts.rate:.2%} (95% interval " in printed


def test_score_rises_and_kl_stays_bounded(demo):
    """KL is bounded by what it may buy: the gain in score, at 0.1 for each nat."""
    _, result, printed = demo
    before, after = result.before, result.after
    gain = after["eval_score"] - before["eval_score"]
    assert before["eval_kl"] == pytest.approx(0, abs=1e-4)
    assert gain > 0.7
    assert 0.1 < after["eval_kl"] < gain / 0.1
    for value in (before["eval_score"], after["eval_score"], after["eval_kl"]):
        assert f" {value:.2f} " in printed
    assert after["eval_ended_frac"] > 0.9


def test_every_step_leaves_a_model_that_loads_and_curves(demo):
    output_dir, _, _ = demo
    for name in ("sft", "ppo"):
        AutoModelForCausalLM.from_pretrained(output_dir / name)
    assert AutoModelForSequenceClassification.from_pretrained(output_dir / "reward_model").config.num_labels == 1
    vocabularies = [
        AutoTokenizer.from_pretrained(output_dir / name).get_vocab() for name in ("sft", "reward_model", "ppo")
    ]
    assert vocabularies[0] == vocabularies[1] == vocabularies[2]
    assert (output_dir / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_reward_model_has_learned_what_readers_like(demo):
    _, result, _ = demo
    assert result.reward_accuracy > 0.65


def test_the_language_model_has_learned_the_grammar(demo):
    output_dir, _, _ = demo
    held_out = openings(100, HELD_OUT_SEED).to_list()
    told = tell_stories(output_dir / "sft", [row["prompt"] for row in held_out])
    read = [pleasantness(story, row["hero"]) for story, row in zip(told, held_out, strict=True)]
    assert sum(valence > -math.inf for valence in read) > 80
