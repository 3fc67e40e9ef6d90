"""Prompts with images on several processes, of which one has none."""

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.models.loading import make_value_model
from rlhf_ppo.models.unwrapping import gathered
from tests.distributed.scenarios import launched_as, whole_parameters
from tests.vision import image_rows, make_processor


def number_of_tokens(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def train(output_dir, models, local_batch_size, **arguments):
    """Take two updates on four rows, the first two of which have images: all of one process of two."""
    reward_model: Any = make_value_model(AutoModelForImageTextToText.from_pretrained(f"{models}/llava"))
    with torch.no_grad(), gathered([reward_model.score.weight], modify=True):  # sharded where it is made, under ZeRO-3
        reward_model.score.weight.copy_(torch.linspace(-1, 1, 32)[None])
    args = PPOConfig(
        output_dir=output_dir, per_device_train_batch_size=local_batch_size, max_steps=2, num_ppo_epochs=2,
        num_mini_batches=1, response_length=4, top_k=1, optim="sgd", learning_rate=1e-2,
        train_sampling_strategy="sequential", logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, num_sample_generations=0, seed=3, local_rollout_forward_batch_size=1, bf16=False,
        ddp_backend="gloo", **arguments,
    )  # fmt: skip
    made, rows = (make_processor("llava"), f"{models}/llava"), image_rows((1, 3, 0, 0))
    trainer = PPOTrainer(args, *made, reward_model=reward_model, reward_funcs=number_of_tokens, train_dataset=rows)
    trainer.train()
    return {**launched_as(trainer), "parameters": whole_parameters(trainer), "log": trainer.state.log_history}


def assert_alike(ranks, alone, models):
    """Both processes have taken the steps of one, which move the vision tower."""
    for name, value in alone["parameters"].items():
        np.testing.assert_allclose(ranks[0]["parameters"][name], value, rtol=0, atol=1e-6, err_msg=name)
    start = AutoModelForImageTextToText.from_pretrained(models / "llava").state_dict()
    tower = [name for name in start if "vision_tower" in name and "q_proj.weight" in name]
    assert min(np.abs(alone["parameters"][f"policy.{name}"] - start[name].numpy()).max() for name in tower) > 1e-6
