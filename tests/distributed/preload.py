"""What the fork server imports once for all processes, and leaves out of their garbage collection.

`train()` collects garbage, which without this would walk through all that the imports made.
"""
# ruff: noqa: F401

import gc

import deepspeed.runtime.engine
import torch.distributed.fsdp
import transformers.generation.utils
import transformers.models.llama.modeling_llama
import trl.models.utils

import tests.distributed.scenarios

gc.collect()
gc.freeze()
