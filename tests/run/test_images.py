"""Runs on prompts with images: what is refused, what is saved and shown, and what vLLM is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForImageTextToText, AutoProcessor

from rlhf_ppo import PPOTrainer
from rlhf_ppo.generation.vllm import VLLMEngine
from rlhf_ppo.models.loading import make_value_model
from rlhf_ppo.reporting.completion_files import find_completions, read_completions
from rlhf_ppo.reporting.report import write_report
from tests.conftest import make_tokenizer, tiny_policy, tiny_scorer
from tests.generation.test_vllm import fake_generation
from tests.runs import QUICK, MakeTrainer, die_and_resume
from tests.vision import image_rows, make_model, make_processor

PROCESSOR = make_processor("llava")
SCORER = make_value_model(make_model("llava", PROCESSOR))
COLUMNS: list[dict[str, Any]] = []


def number_of_images(prompts: Any, completions: Any, images: Any, **columns: Any) -> list[float]:
    """Also keeps what it was given."""
    COLUMNS.append({"prompts": prompts, "completions": completions, "images": images, **columns})
    return [float(len(each)) for each in images]


RUN = QUICK | {"per_device_train_batch_size": 4, "total_episodes": 8, "num_mini_batches": 2}
RUN |= {"processing_class": PROCESSOR, "value_model": None, "reward_funcs": number_of_images}


@pytest.fixture
def make(make_trainer: MakeTrainer) -> MakeTrainer:
    """Factory of trainers of a LLaVA on prompts with up to three images."""

    def made(**given: Any) -> PPOTrainer:
        new = {"model": make_model("llava", PROCESSOR), "train_dataset": image_rows((1, 3, 0, 2))}
        return make_trainer(**RUN | new | given)

    return made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rollout_func": print}, "tools, environments and rollout_func read texts only"),
        ({"generation_engine": "continuous"}, "generation_engine='continuous' reads texts only"),
        ({"model": tiny_policy(), "processing_class": make_tokenizer()}, "model is a .* without vision"),
        ({"processing_class": PROCESSOR.tokenizer}, "there is no processor: pass processing_class=AutoProcessor"),
        ({"reward_model": tiny_scorer()}, "reward_model is a .* without vision"),
        (
            {"reward_model": SCORER, "reward_processing_classes": make_tokenizer()},
            "a reward model has its own tokens: pass its proc",
        ),
    ],
)
def test_what_cannot_read_images_is_refused(given: dict[str, Any], message: str, make: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=f"a data set has images, but {message}"):
        make(**given)


def test_step_refuses_an_image_and_so_does_evaluation_of_a_run_without_any(make: MakeTrainer) -> None:
    trainer = make(train_dataset=[{"prompt": "w3 w4"}] * 4)
    token = PROCESSOR.image_token_id
    texts = [torch.tensor([5, 6])] * 4
    with pytest.raises(ValueError, match=rf"queries\[0\] .* without {token}, an image's: pass texts only"):
        trainer.step([torch.tensor([5, token])] * 4, texts, [1.0] * 4)
    with pytest.raises(ValueError, match=r"row 0 of eval_dataset has images, .* give train_dataset images too"):
        trainer.evaluate(image_rows((1,)))


def test_a_run_saves_shows_and_resumes_bit_for_bit(make: MakeTrainer, tmp_path: Path) -> None:
    """Its critic too, and its reward functions get the images and the conversations that hold them."""

    def arguments() -> dict[str, Any]:
        rewards: Any = make_value_model(make_model("llava", PROCESSOR, 1))
        torch.nn.init.ones_(rewards.score.weight)
        given = {"reward_model": rewards, "eval_dataset": image_rows((2, 0))}
        return RUN | given | {"save_critic": True, "num_sample_generations": 1}

    COLUMNS.clear()
    _, whole = die_and_resume(make, tmp_path, arguments)

    row = next(index for index, images in enumerate(COLUMNS[0]["images"]) if len(images) == 3)
    blocks = COLUMNS[0]["prompts"][row][0]["content"]
    assert [block.get("image") for block in blocks] == [*COLUMNS[0]["images"][row], None]
    assert COLUMNS[0]["completions"][row][0]["role"] == "assistant" and "<images>" not in COLUMNS[0]

    saved = tmp_path / "saved"
    whole.save_model(str(saved))
    policy = AutoModelForImageTextToText.from_pretrained(saved)
    torch.testing.assert_close(policy.state_dict(), whole.policy_model.state_dict(), rtol=0, atol=0)
    assert type(AutoProcessor.from_pretrained(saved)).__name__ == "LlavaProcessor"
    assert "pipeline_tag: image-text-to-text" in Path(whole.args.output_dir, "README.md").read_text()
    again = make(model=str(saved), value_model=str(saved / "critic"))
    torch.testing.assert_close(again.value_model.state_dict(), whole.value_model.state_dict(), rtol=0, atol=0)

    (table,) = (pd.read_csv(path) for path in (tmp_path / "whole" / "_samples").glob("*.csv"))
    assert [str(cell).count("data:image/jpeg") for cell in table["images"]] == [2, 0]
    kept = read_completions(find_completions(tmp_path / "whole")[2])
    assert sorted(len(each["images"]) for each in kept) == [0, 1, 2, 3]
    page = write_report([tmp_path / "whole"], tmp_path / "report.html").read_text()
    assert page.count("data:image/jpeg") == 2 + 2 * 6


def test_adapters_over_one_base_leave_the_tower_alone(make: MakeTrainer) -> None:
    config = LoraConfig(r=2, target_modules="all-linear")
    trainer = make(peft_config=config, share_base_model=True)
    before = {name: each.clone() for name, each in trainer.model.named_parameters() if each.requires_grad}
    trainer.train()
    assert not any("vision_tower" in name or "projector" in name for name in before)
    after = dict(trainer.model.named_parameters())
    moved = [name for name, each in before.items() if not after[name].equal(each)]
    assert sum("policy" in name for name in moved) > 10 < sum("value_model" in name for name in moved)
    named = LoraConfig(r=2, target_modules=["vision_tower.encoder.layers.0.self_attn.q_proj"])
    towers = make(peft_config=named).policy_model.named_parameters()
    assert all("vision_tower" in name for name, each in towers if each.requires_grad)


@pytest.mark.parametrize("head", ["policy", None])
def test_vllm_is_asked_with_the_images(head: str | None, make: MakeTrainer) -> None:
    """`VLLMGeneration` sends them beside the tokens; see `tests/generation/test_vllm.py`."""
    vllm, token = fake_generation([[5, 1]] * 4, [[[-1.0], [-1.0]]] * 4), PROCESSOR.image_token_id
    make(engine=VLLMEngine(vllm), value_model=head).train()
    (prompts,), asked = vllm.generate.call_args_list[0]
    assert sorted(len(images or ()) for images in asked["images"]) == [0, 1, 2, 3] and None in asked["images"]
    assert [ids.count(token) for ids in prompts] == [5 * len(images or ()) for images in asked["images"]]
    assert vllm.generation_kwargs["logit_bias"] == {token: -100.0}
