"""Prompts with images on several processes, of which one has none."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.models.loading import make_value_model
from tests.distributed import processes
from tests.distributed.processes import LAUNCHERS
from tests.distributed.scenarios import launched_as, whole_parameters
from tests.vision import image_rows, make_model, make_processor

pytestmark = pytest.mark.distributed


def number_of_tokens(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def train(output_dir, policy, num_rows, **arguments):
    """Take two updates on four rows, the first two of which have images; `num_rows` of them on this process."""
    processor = make_processor("llava")
    reward_model = make_value_model(make_model("llava", processor, 1))
    with torch.no_grad():
        reward_model.score.weight.copy_(torch.linspace(-1, 1, 32)[None])
    args = PPOConfig(
        output_dir=output_dir, per_device_train_batch_size=num_rows, max_steps=2, num_ppo_epochs=2, num_mini_batches=1,
        response_length=4, top_k=1, optim="sgd", learning_rate=1e-2, train_sampling_strategy="sequential",
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, num_sample_generations=0, seed=3,
        local_rollout_forward_batch_size=1, bf16=False, **arguments,
    )  # fmt: skip
    trainer = PPOTrainer(
        args,
        processor,
        policy,
        reward_model=reward_model,
        reward_funcs=number_of_tokens,
        train_dataset=image_rows((1, 3, 0, 0)),
    )
    trainer.train()
    return {**launched_as(trainer), "parameters": whole_parameters(trainer), "log": trainer.state.log_history}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("llava"))
    make_model("llava", make_processor("llava")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(policy, tmp_path_factory):
    return train(str(tmp_path_factory.mktemp("alone")), policy, 4, use_cpu=True)


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ("multi_gpu", {}),
        ("deepspeed_zero2", {}),
        ("deepspeed_zero3", {}),
        ("deepspeed_zero3", {"ds3_gather_for_generation": False}),
        ("fsdp2", {}),
    ],
    ids=["DDP", "ZeRO-2", "ZeRO-3", "ZeRO-3 layer by layer", "FSDP2"],
)
def test_a_rank_without_images_takes_the_step_of_one_process(config, arguments, policy, alone, tmp_path):
    call = (
        "tests.distributed.test_images.train",
        {"output_dir": str(tmp_path), "policy": policy, "num_rows": 2, "ddp_backend": "gloo"},
    )
    (ranks,) = processes.run_all(config, [(call[0], call[1] | arguments)])
    assert [(rank["num_processes"], rank["zero_stage"]) for rank in ranks] == [(2, LAUNCHERS[config][1])] * 2
    start = AutoModelForImageTextToText.from_pretrained(policy).state_dict()
    tower = [name for name in start if "vision_tower" in name and "q_proj.weight" in name]
    for name, value in alone["parameters"].items():
        np.testing.assert_allclose(ranks[0]["parameters"][name], value, rtol=0, atol=1e-6, err_msg=name)
    assert all(np.abs(alone["parameters"][f"policy.{name}"] - start[name].numpy()).max() > 1e-7 for name in tower)
