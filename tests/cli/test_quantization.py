"""`--load_in_4bit` and `--load_in_8bit`: what `from_pretrained` gets, and what is said where they cannot work."""

import pytest
import torch
from accelerate import PartialState
from trl.trainer.model_config import ModelConfig

from rlhf_ppo.cli import arguments
from rlhf_ppo.cli.arguments import quantization_options


@pytest.fixture
def installed(monkeypatch):
    """Pretend that this machine has a GPU, and bitsandbytes or not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(arguments, "get_quantization_config", lambda model_args: "the configuration")

    def choose(is_installed):
        monkeypatch.setattr(arguments, "find_spec", lambda name: (name == "bitsandbytes" and is_installed) or None)

    return choose


def test_nothing_is_quantized_unless_asked():
    assert quantization_options(ModelConfig()) == {}


@pytest.mark.parametrize("option", ["load_in_4bit", "load_in_8bit"])
def test_on_a_gpu_the_whole_model_is_quantized_onto_this_process_s_device(installed, option):
    installed(True)
    options = quantization_options(ModelConfig(**{option: True}))
    assert options == {"quantization_config": "the configuration", "device_map": {"": PartialState().device}}


def test_without_bitsandbytes_the_option_and_the_remedy_are_named(installed):
    installed(False)
    with pytest.raises(ValueError, match=r"load_in_8bit=True needs bitsandbytes, .*: pip install bitsandbytes"):
        quantization_options(ModelConfig(load_in_8bit=True))


def test_without_a_gpu_the_option_and_the_way_out_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"load_in_4bit=True .* needs a CUDA GPU, .*: leave --load_in_4bit out"):
        quantization_options(ModelConfig(load_in_4bit=True))
