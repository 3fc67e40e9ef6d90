"""Write docs/memory.md from the estimate that a run starts with: `python docs/hooks/memory_guide.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_ppo.estimate import update as estimates
from rlhf_ppo.estimate.run import BANDWIDTHS, MEMORY_NOT_COUNTED, rounded_seconds
from rlhf_ppo.estimate.update import Estimate, NoStorage, PassCost, Sharding, Workload, estimate_update, stored_bytes
from rlhf_ppo.models.unwrapping import as_in_learning, backbone

PAGE = Path(__file__).parents[1] / "memory.md"
SIZES = {  # of Qwen2.5 0.5B, Llama 3.2 1B and 3B, Llama 3.1 8B
    "0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936, True),
    "1B": ("llama", 2048, 16, 32, 8, 8192, 128256, True),
    "3B": ("llama", 3072, 28, 24, 8, 8192, 128256, True),
    "8B": ("llama", 4096, 32, 32, 8, 14336, 128256, False),
}
WORKLOAD = Workload(
    rows=64, rows_per_call=64, rows_per_micro_batch=4, prompt_length=512, response_length=512, num_ppo_epochs=4,
    recomputes=True, dtype=torch.bfloat16,
)  # fmt: skip
ENGINES = {  # by the accelerate configuration: stage of ZeRO, whether FSDP shards
    "single_gpu": (None, False),
    "deepspeed_zero2": (2, False),
    "deepspeed_zero3": (3, False),
    "fsdp2": (None, True),
}
NUMBERS = (2, 4, 8)
EXCHANGING = {"deepspeed_zero2": "ZeRO-2", "deepspeed_zero3": "ZeRO-3", "fsdp2": "FSDP2"}
ADAM = 8.0
"""Bytes of Adam's state for each weight."""


def models_of(size: str, lora: bool) -> tuple[nn.Module, nn.Module, list[nn.Module]]:
    """Make policy, value model and frozen models without storage; LoRA has its bases in bfloat16, and no reference."""
    kind, width, layers, heads, keys, inner, vocabulary, tied = SIZES[size]
    config = AutoConfig.for_model(
        kind, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=keys,
        intermediate_size=inner, vocab_size=vocabulary, tie_word_embeddings=tied, max_position_embeddings=4096,
        pad_token_id=0, num_labels=1,
    )  # fmt: skip
    dtype = torch.bfloat16 if lora else torch.float32
    with NoStorage():
        policy: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        value_model: Any = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
        if not lora:
            reference = AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False)
            return policy, value_model, [reference]
    adapters = [LoraConfig(r=16, target_modules="all-linear", task_type=kind) for kind in ("CAUSAL_LM", "SEQ_CLS")]
    return get_peft_model(policy, adapters[0]), get_peft_model(value_model, adapters[1]), []


def remembering(count: Callable[..., Any]) -> Callable[..., Any]:
    """Count each pass once, as engines differ in what they make of it, and over two layers: all others are alike."""

    @functools.cache
    def counted(model: nn.Module, rows: int, length: int, enabled: bool, stored: Any, training: bool) -> Any:
        autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled)
        body: Any = backbone(model)
        layers, found = body.layers, []
        for number in (1, 2):
            body.layers = layers[:number]
            found.append(count(model, rows, length, autocast, stored))
        body.layers = layers
        return extrapolated(*found, len(layers))

    def remembered(model: nn.Module, rows: int, length: int, autocast: Any, stored: Any = None) -> Any:
        training = any(module.training for module in model.modules())
        return counted(model, rows, length, autocast()._enabled, stored, training)

    return remembered


def extrapolated(one: Any, two: Any, number: int) -> Any:
    """Return the cost of so many layers, given that of one and of two."""
    if isinstance(one, int):
        return one + (number - 1) * (two - one)
    return PassCost(*(extrapolated(*pair, number) for pair in zip(astuple(one), astuple(two), strict=True)))


def gigabytes(size: str) -> Iterator[tuple[str, list[float | None], list[str]]]:
    """Yield each way to train with its GB per GPU: one GPU, then each engine on each number; None: refused.

    Beside them stands what 8 GPUs load and exchange; nothing where only models on one base differ.
    """
    for lora in (False, True):
        policy, value_model, frozen = models_of(size, lora)
        with as_in_learning(True, None, policy, value_model):
            found = {
                name: [estimated(policy, value_model, frozen, engine, number) for number in numbers_of(name)]
                for name, engine in ENGINES.items()
            }
        peaks = [each.peak / 1e9 for column in found.values() for each in column]
        yield ("LoRA" if lora else "all weights"), peaks, exchanged({name: found[name][-1] for name in EXCHANGING})
        if lora:
            base = [weight for weight in backbone(value_model).parameters() if not weight.requires_grad]
            shared = stored_bytes(base)
            peaks: list[float | None] = [
                None if name in ("deepspeed_zero3", "fsdp2") else (each.peak - shared) / 1e9
                for name, column in found.items()
                for each in column
            ]
            yield "LoRA over one base", peaks, []


def exchanged(estimates: dict[str, Estimate]) -> list[str]:
    """Write a node's host memory, and what each of 8 GPUs sends with each engine, with seconds at both rates."""
    sent = [estimate.communication.total for estimate in estimates.values()]
    of_fsdp = estimates["fsdp2"]
    gathered = (of_fsdp.gathered_weights, of_fsdp.gathered_optimizer)
    held = [f"{number / 1e9:.0f}" for number in (of_fsdp.host, sum(gathered), gathered[0])]
    times = [" and ".join(rounded_seconds(number / rate) for rate in BANDWIDTHS) for number in sent]
    return [*held, *(f"{number / 1e9:.0f}: {each}" for number, each in zip(sent, times, strict=True))]


def numbers_of(engine: str) -> tuple[int, ...]:
    """The numbers of GPUs of an engine's columns."""
    return (1,) if engine == "single_gpu" else NUMBERS


def estimated(
    policy: nn.Module, value_model: nn.Module, frozen: list[nn.Module], engine: tuple[int | None, bool], number: int
) -> Estimate:
    """Estimate a run on so many GPUs."""
    sharding = Sharding.of(*engine, number, torch.bfloat16)
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16, sharding.stored is None)
    workload = replace(WORKLOAD, sequential_backward=number == 1)
    return estimate_update(policy, value_model, frozen, workload, ADAM, sharding, autocast)


def page(sizes: Iterable[str] = SIZES) -> str:
    """Write the page, with the rows of these models."""
    columns = ["1 GPU", *(f"{name} x{n}" for name in ("ZeRO-2", "ZeRO-3", "FSDP2") for n in NUMBERS)]
    head = [["size", "trained", *columns], ["---"] * (2 + len(columns))]
    remember = {name: remembering(getattr(estimates, name)) for name in ("count_pass", "count_cache_bytes")}
    of_host = ["loading", "full checkpoint", "sharded checkpoint"]
    exchange = [["size", "trained", *of_host, *EXCHANGING.values()], ["---"] * (5 + len(EXCHANGING))]
    with patch.multiple(estimates, **remember):
        for size in sizes:
            for way, values, sent in gigabytes(size):
                head.append([size, way, *("-" if value is None else f"{value:.0f}" for value in values)])
                if sent:
                    exchange.append([size, way, *sent])
    table, exchanges = ("\n".join(f"| {' | '.join(cells)} |" for cells in rows) for rows in (head, exchange))
    return TEXT.format(table=table, exchanges=exchanges, not_counted=MEMORY_NOT_COUNTED)


TEXT = """# How much memory

Estimated GB (10^9 bytes) on each GPU. A run prints the same estimate at its start, and `rlhf-ppo estimate` prints
it for your models, lengths and engine ([Command line](command-line.md)). `python docs/hooks/memory_guide.py` wrote
this page.

{table}

| trained | meaning |
| --- | --- |
| all weights | policy and value model in float32 with bf16 arithmetic, beside a frozen reference |
| LoRA | adapters of rank 16 on all linear layers of both, over bases in bfloat16; the reference is the policy \
without its adapter |
| LoRA over one base | `share_base_model`; not possible with ZeRO-3 and FSDP |

The shapes are those of Qwen2.5 0.5B, Llama 3.2 1B and 3B and Llama 3.1 8B. The reward is a function. A reward
model of the same size takes as much memory as the reference, in the type in which you load it.

Prompts and responses have 512 tokens. Each GPU has 64 episodes per update, generates them at once, and learns in
micro-batches of 4, with gradient checkpointing and AdamW. Not counted are
{not_counted}: leave a fifth free. Nothing was measured on a GPU.

| column | accelerate configuration |
| --- | --- |
| 1 GPU | `accelerate_configs/single_gpu.yaml` |
| ZeRO-2 | `accelerate_configs/deepspeed_zero2.yaml`, with `--num_processes` of `accelerate launch` |
| ZeRO-3 | `accelerate_configs/deepspeed_zero3.yaml`; `deepspeed_zero3_offload.yaml` uses the CPU, too |
| FSDP2 | `accelerate_configs/fsdp2.yaml` |

If your run does not fit, use

- smaller micro-batches (`per_device_train_batch_size`, or `max_tokens_per_micro_batch`);
- fewer rows in generation (`local_rollout_forward_batch_size`);
- `offload_frozen`;
- an 8-bit optimizer (`--optim adamw_torch_8bit`, with `pip install torchao`): 2 bytes of
  state for each trained weight in place of 8.

## Host memory and communication

The same runs on a node of 8 GPUs:

| column | GB |
| --- | --- |
| loading | host memory of the node while models are loaded; its processes map one copy of each. Policy and value \
model are there until training starts. FSDP2 shards the reference and each reward model before the next one is \
loaded, so one of them is there at a time. DDP and ZeRO-1/2 load all models at once; ZeRO-3 shards them while it \
reads their files. The first process has one more model while it converts a 16-bit checkpoint or makes the value \
model |
| full checkpoint, sharded checkpoint | host memory that the first process needs for an FSDP2 checkpoint, with \
`FULL_STATE_DICT` and with `SHARDED_STATE_DICT`. ZeRO-3 gathers the weights alone, in 16 bits |
| ZeRO-2, ZeRO-3, FSDP2 | data that each GPU sends in an update of 64 micro-batches and 4 optimizer steps, with \
the time at 300 GB/s (NVLink within a node) and at 50 GB/s (400 Gbit/s per GPU between nodes) |

{exchanges}

ZeRO-2 reduces gradients for every micro-batch; ZeRO-3 and FSDP2 also gather all parameters for every forward and
backward pass. The cost of a micro-batch does not depend on its size: use the largest size that fits
(`per_device_train_batch_size`; lower `gradient_accumulation_steps` by the same factor to keep the update the
same). `rlhf-ppo estimate --device_memory 8e10` tells you the size. DDP and ZeRO-1 exchange gradients once per
optimizer step. FSDP2 can keep parameters gathered between a forward and a backward pass
(`fsdp_reshard_after_forward: false`), which saves a quarter of the traffic and needs all parameters on each
GPU. To reduce gradients only at the last micro-batch of a step, set `accelerator_config` to
`{{"gradient_accumulation_kwargs": {{"sync_each_batch": false}}}}`. FSDP2 then keeps whole gradients on each GPU, 4
bytes per trained weight; the estimate counts them.

`python benchmarks/scale.py` simulates a rank of 8 and of 64 under FSDP2: the estimate agrees
([Many devices](distributed.md#at-scale)).
"""


if __name__ == "__main__":
    PAGE.write_text(page())
