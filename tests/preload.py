"""What the fork server imports once for all processes, and leaves out of their garbage collection.

A process of tests has one fork server, whichever file starts it: it holds what any of them runs. `train()` collects
garbage, which without this would walk through all that the imports made.
"""
# ruff: noqa: F401

import gc

import deepspeed.runtime.engine
import torch.distributed.fsdp
import transformers.generation.utils
import transformers.models.llama.modeling_llama
import trl.models.utils
import trl.trainer.reward_trainer
import trl.trainer.sft_trainer

import rlhf_ppo.cli.judge
import rlhf_ppo.cli.training_commands
import rlhf_ppo.reporting.report
import tests.distributed.scenarios

gc.collect()
gc.freeze()
