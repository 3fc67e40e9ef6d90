"""Quantized models on the command line: bitsandbytes, which runs on CUDA."""

from importlib.util import find_spec
from typing import Any

import torch
from accelerate import PartialState
from trl.trainer.model_config import ModelConfig
from trl.trainer.utils import get_quantization_config


def quantization_options(model_args: ModelConfig) -> dict[str, Any]:
    """Return what `from_pretrained` needs for `--load_in_4bit` and `--load_in_8bit`; nothing without them.

    Args:
        model_args: TRL's options of a model.

    Raises:
        ValueError: There is no CUDA GPU, or bitsandbytes is not installed.
    """
    asked = [name for name in ("load_in_4bit", "load_in_8bit") if getattr(model_args, name)]
    if not asked:
        return {}
    if not torch.cuda.is_available():
        raise ValueError(
            f"{asked[0]}=True quantizes with bitsandbytes, which needs a CUDA GPU, and torch finds none here: leave "
            f"--{asked[0]} out (with --use_peft --dtype bfloat16 the frozen weights take 16 bits), or use a GPU"
        )
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"{asked[0]}=True needs bitsandbytes, which is not installed: pip install bitsandbytes")
    return {"quantization_config": get_quantization_config(model_args), "device_map": {"": PartialState().device}}
