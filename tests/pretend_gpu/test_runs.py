"""Whole runs of one process on the pretend GPU in bf16, and paths that only runs on a GPU take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.cli.answers import respond
from rlhf_ppo.cli.arguments import SFTArguments
from rlhf_ppo.cli.judge_arguments import JudgeArguments
from rlhf_ppo.cli.trainers import sft_trainer
from rlhf_ppo.rewards.judges import PreferenceReward
from tests.conftest import make_tokenizer, prompt_rows, save_models, tiny_policy
from tests.distributed.scenarios import prefers_larger_words
from tests.gpu.conftest import MakeTrainer, device, make_device_trainer, small_policy  # noqa: F401
from tests.runs import die_and_resume

ADAPTER: Any = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
OF_ONE_BASE = {"share_base_model": True, "peft_config": ADAPTER, "value_model": None}
RUNS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": {"peft_config": ADAPTER, "value_peft_config": ADAPTER},
    "LoRA over one base": OF_ONE_BASE,
    "a judge that compares with the reference": {
        "reward_funcs": [PreferenceReward(prefers_larger_words, "reference", name="judge")]
    },
}
EACH: dict[str, Any] = {
    "eval_dataset": prompt_rows(6), "eval_strategy": "steps", "eval_steps": 1, "num_sample_generations": 1,
    "save_strategy": "steps", "save_steps": 1, "max_steps": 3,
}  # fmt: skip
"""Evaluation, sample tables and checkpoints."""


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_died_and_was_resumed_ends_bit_for_bit_like_one_that_did_not(
    name: str,
    make_device_trainer: MakeTrainer,  # noqa: F811
    tmp_path: Path,
) -> None:
    """With an evaluation after each update, in bf16."""

    _, whole = die_and_resume(make_device_trainer, tmp_path, lambda: EACH | RUNS[name])
    log = whole.state.log_history
    assert [entry["step"] for entry in log if "eval_score" in entry] == [1, 2, 3]
    assert all(value.device.type == "cuda" for value in whole.model.parameters())


def test_answers_are_those_of_the_cpu() -> None:
    """The likeliest tokens, as `rlhf-ppo judge` and `answer` generate them."""
    named: Any = {"dataset_name": "rows", "model": "", "opponent_column": "", "judge": "length"}
    args = JudgeArguments(**named, max_new_tokens=8, temperature=0.0, batch_size=3)
    places = ("cuda", "cpu")
    ours, theirs = (respond(tiny_policy().to(place), make_tokenizer(), prompt_rows(5), args) for place in places)
    assert [one.response_ids for one in ours] == [one.response_ids for one in theirs] and len(ours) == 5


def test_sft_learns_on_the_device(tmp_path: Path) -> None:
    save_models(tmp_path, model=tiny_policy())
    args = SFTArguments(
        output_dir=str(tmp_path / "run"), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2,
        logging_steps=1, bf16=True, report_to="none", save_strategy="no", gradient_checkpointing=False,
        disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_list([{"text": "w1 w2 w3 w4"}] * 16)
    trainer: Any = sft_trainer(args, ModelConfig(model_name_or_path=str(tmp_path / "model")), rows, None)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert next(trainer.model.parameters()).is_cuda and trainer.args.dataloader_pin_memory
    assert losses[-1] < losses[0] - 0.5
