"""Count on a CPU, under bf16's autocast, what an accelerator would move and wait for: no time is measured.

*decoding*: one step of a policy over a cache that is full up to there: the casts, and the bytes that its operations
read and write, each for itself, against the least: each weight is read once in 16 bits, the cache once, and one token
is written to it. (`DynamicCache` copies the cache for each token; that counts.) The cache is filled without
computing what a prompt would; all else is a run's own. *learning*: how often the host waits for its device, per
micro-batch. What the head moves, `head_bytes.py` counts.

With PYTHONPATH at another checkout, that one's trainer is counted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from counters import Moves, waits
from datasets import Dataset
from workloads import Workload, make_tokenizer


class Shape(NamedTuple):
    """A policy that decodes.

    Attributes:
        rows: How many.
        context: Tokens of each before its response; one row has half as many.
        width: Hidden size.
        vocabulary: Tokens of the vocabulary.
        lora: Whether LoRA is trained, on all linear layers, or the whole policy.
        tied: Whether the head is the embedding.
        layers: How many.
    """

    rows: int
    context: int
    width: int
    vocabulary: int
    lora: bool = True
    tied: bool = False
    layers: int = 2

    def __str__(self) -> str:
        """Name the shape in a table."""
        kind = f"{'LoRA' if self.lora else 'full'}{', tied' if self.tied else ''}"
        return f"{self.rows} x {self.context}, {self.layers} x {self.width}, {self.vocabulary} tokens, {kind}"


SHAPES = (
    Shape(8, 128, 256, 2048),
    Shape(32, 512, 512, 2048),
    Shape(64, 1024, 1024, 50304),
    Shape(64, 256, 1024, 50304, lora=False),
    Shape(64, 256, 1024, 50304, tied=True),
    Shape(8, 256, 1024, 50304, lora=False, tied=True),
    Shape(2, 4096, 2048, 32000, layers=1),
)


class Decoded(NamedTuple):
    """What one step of decoding moved.

    Attributes:
        casts: Number of casts between floating-point types.
        cast_bytes: What they read and wrote.
        total: Bytes that all operations read and wrote.
        least: Bytes that any must.
        cache: Bytes of a cached number.
    """

    casts: int
    cast_bytes: int
    total: int
    least: int
    cache: int


class _Enough(Exception):
    """Ends a run whose decoding has been counted."""


def llama(layers: int, width: int, vocabulary: int, kind: Any, **changes: Any) -> Any:
    """Make a Llama with grouped heads, half as many keys as queries."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        pad_token_id=0,
        max_position_embeddings=8192,
        **changes,
    )
    torch.manual_seed(0)
    return kind(config)


def trainer_over(folder: str, policy: Any, prompts: Sequence[int], lora: bool = True, **changes: Any) -> Any:
    """Make a trainer in bf16 over a policy and prompts of given lengths."""
    from peft import LoraConfig
    from transformers import LlamaForSequenceClassification

    from rlhf_ppo import PPOConfig, PPOTrainer

    args: dict[str, Any] = {
        "bf16": True,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "output_dir": folder,
        "report_to": "none",
        "disable_tqdm": True,
        "num_sample_generations": 0,
        "save_strategy": "no",
        "logging_strategy": "no",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 2,
        "total_episodes": 8,
        "response_length": 8,
    }
    rows = [{"input_ids": [3 + (row + index) % 29 for index in range(length)]} for row, length in enumerate(prompts)]
    return PPOTrainer(
        args=PPOConfig(**args | changes),
        processing_class=make_tokenizer(Workload({"vocab_size": 64}, (2, 6), 8)),
        model=policy,
        value_model=llama(1, 32, policy.config.vocab_size, LlamaForSequenceClassification, num_labels=1),
        reward_funcs=lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids],
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )


def decoding(shape: Shape) -> Decoded:
    """Count one step of decoding: the forward pass of the last of three sampled tokens."""
    from transformers import DynamicCache, LlamaForCausalLM

    model = llama(shape.layers, shape.width, shape.vocabulary, LlamaForCausalLM, tie_word_embeddings=shape.tied)
    forward, generate = model.forward, model.generate
    steps: list[Moves] = []
    kept: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        with Moves() as counter:
            output = forward(*args, **kwargs)
        steps.append(counter)
        kept.append(output.past_key_values)
        return output

    def after_a_prompt(*args: Any, input_ids: Any, **kwargs: Any) -> Any:
        if input_ids.shape != (shape.rows, shape.context):
            return generate(*args, input_ids=input_ids, **kwargs)
        given = [kwargs.pop(name, None) for name in ("past_key_values", "cache")]  # renamed in transformers 5.24
        cache = next((each for each in given if each is not None), DynamicCache(config=model.config))
        token = forward(input_ids=input_ids[:, :1], past_key_values=DynamicCache(config=model.config), use_cache=True)
        layers: Any = zip(cache.layers, token.past_key_values.layers, strict=True)
        for layer, one in layers:
            layer.update(*(part.expand(-1, -1, shape.context - 1, -1) for part in (one.keys, one.values)))
        generate(*args, input_ids=input_ids, past_key_values=cache, **kwargs)
        raise _Enough

    sizes = {"per_device_train_batch_size": shape.rows, "gradient_accumulation_steps": 1, "total_episodes": shape.rows}
    prompts = [shape.context // 2, *(shape.rows - 1) * [shape.context]]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_over(
            folder, model, prompts, shape.lora, response_length=3, local_rollout_forward_batch_size=shape.rows, **sizes
        )
        try:
            with mock.patch.multiple(model, forward=counted, generate=after_a_prompt):
                trainer.train()
        except _Enough:
            pass
    assert kept[-1].get_seq_length() == shape.context + 2
    numbers = 2 * sum(layer.keys.numel() for layer in kept[-1].layers)
    looked_up = 0 if shape.tied else model.get_input_embeddings().weight.numel()
    weights = sum(value.numel() for value in trainer.policy_model.parameters()) - looked_up
    written = numbers // (shape.context + 2)
    step, cached = steps[-1], kept[-1].layers[0].keys.dtype.itemsize
    return Decoded(step.casts, step.cast_bytes, step.total, 2 * (weights + numbers + written), cached)


def waits_of_learning() -> float:
    """Count the host's waits while a trainer learns, attending to packed rows as an accelerator does."""
    from transformers import LlamaForCausalLM

    from rlhf_ppo.models import packing

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(packing, "_attend_row_by_row", packing._attend_padded),
    ):
        trainer = trainer_over(folder, llama(1, 64, 2048, LlamaForCausalLM), [2 + row % 5 for row in range(16)])
        learn, counted = trainer.learn, []

        def counting(*args: Any) -> Any:
            with waits() as counter:
                result = learn(*args)
            counted.append(counter.total)
            return result

        trainer.learn = counting
        trainer.train()
        args = trainer.args
        num_parts = args.num_ppo_epochs * args.total_episodes // args.per_device_train_batch_size
    return sum(counted) / num_parts


def _decoding_table() -> None:
    print("| decoding | casts | MB of casts | MB | least | times | bytes of a cached number |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        counted = decoding(shape)
        megabytes = [f"{value / 1e6:.1f}" for value in (counted.cast_bytes, counted.total, counted.least)]
        times = f"{counted.total / counted.least:.2f}"
        print(f"| {' | '.join([str(shape), str(counted.casts), *megabytes, times, str(counted.cache)])} |", flush=True)


PARTS = ("decoding", "learning")


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"of {', '.join(PARTS)}")
    parts = parser.parse_args().parts
    if "decoding" in parts:
        _decoding_table()
    if "learning" in parts:
        print(f"\nlearning: the host waits {waits_of_learning():.4g} times per micro-batch")


if __name__ == "__main__":
    main()
