"""Prompts with images on several processes, of which one has none."""

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from rlhf_ppo.models.loading import make_value_model
from rlhf_ppo.models.unwrapping import gathered
from tests.distributed.scenarios import make_trainer, report, whole_parameters
from tests.vision import image_rows, make_processor


def train(output_dir, models, local_batch_size):
    """Take two updates on four rows, the first two of which have images: all of one process of two."""
    reward_model: Any = make_value_model(AutoModelForImageTextToText.from_pretrained(f"{models}/llava"))
    with torch.no_grad(), gathered([reward_model.score.weight], modify=True):  # sharded where it is made, under ZeRO-3
        reward_model.score.weight.copy_(torch.linspace(-1, 1, 32)[None])
    given = {"processing_class": make_processor("llava"), "model": f"{models}/llava", "reward_model": reward_model}
    given |= {"value_model": None, "train_dataset": image_rows((1, 3, 0, 0)), "eval_dataset": None}
    args = {"per_device_train_batch_size": local_batch_size, "local_rollout_forward_batch_size": 1, "max_steps": 2}
    args |= {"gradient_accumulation_steps": 1, "num_mini_batches": 1, "train_sampling_strategy": "sequential"}
    args |= {"response_length": 4, "stop_token": None, "top_k": 1, "optim": "sgd", "learning_rate": 1e-2}
    trainer = make_trainer(output_dir, models, given=given, **args)
    trainer.train()
    return report(trainer, parameters=whole_parameters(trainer))


def assert_alike(ranks, alone, models):
    """Both processes have taken the steps of one, which move the vision tower."""
    for name, value in alone["parameters"].items():
        np.testing.assert_allclose(ranks[0]["parameters"][name], value, rtol=0, atol=1e-6, err_msg=name)
    start = AutoModelForImageTextToText.from_pretrained(models / "llava").state_dict()
    tower = [name for name in start if "vision_tower" in name and "q_proj.weight" in name]
    assert min(np.abs(alone["parameters"][f"policy.{name}"] - start[name].numpy()).max() for name in tower) > 1e-6
