"""Count on a CPU, under bf16's autocast, what an accelerator would wait for and move: no time is measured.

*decoding*: one step of LoRA's policy over a cache, with its casts, and the bytes that its operations read and write,
against the ideal: each weight is read once in 16 bits, the cache once, and one token is written to it. *learning*: how
often the host waits for its device, per micro-batch. What the head moves, `head_bytes.py` counts.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any, NamedTuple
from unittest import mock

import torch
from counters import Moves, waits
from datasets import Dataset
from workloads import Workload, make_tokenizer

DTYPE = torch.bfloat16


class Figure(NamedTuple):
    """One line of the table.

    Attributes:
        what: What was counted.
        count: How many.
        ideal: How many there must be at least; None where it is 0.
    """

    what: str
    count: float
    ideal: float | None = None


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
        max_position_embeddings=4096,
        **changes,
    )
    torch.manual_seed(0)
    return kind(config)


def trainer_over(folder: str, layers: int, width: int, vocabulary: int, **changes: Any) -> Any:
    """Make a trainer in bf16 over a policy with LoRA."""
    from peft import LoraConfig
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

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
    rows = [{"input_ids": [3 + (row + index) % 29 for index in range(2 + row % 5)]} for row in range(16)]
    return PPOTrainer(
        args=PPOConfig(**args | changes),
        processing_class=make_tokenizer(Workload({"vocab_size": 64}, (2, 6), 8)),
        model=llama(layers, width, vocabulary, LlamaForCausalLM),
        value_model=llama(1, 32, vocabulary, LlamaForSequenceClassification, num_labels=1),
        reward_funcs=lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids],
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def decoding(rows: int = 32, context: int = 512, layers: int = 2, width: int = 512) -> list[Figure]:
    """Count one step of decoding: the forward pass of the last token of three."""
    from rlhf_ppo.data.prompts import Prompts
    from rlhf_ppo.generation.transformers_engine import sampling_config

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_over(folder, layers, width, 2048, response_length=3)
        policy = trainer.policy_model.eval()
        mask = torch.ones(rows, context, dtype=torch.bool)
        mask[0, : context // 2] = False
        prompts = Prompts(torch.ones_like(mask, dtype=torch.long), mask, {})
        counters: list[Moves] = []
        model = policy.get_base_model()
        forward = model.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            with Moves() as counter:
                output = forward(*args, **kwargs)
            counters.append(counter)
            cache.append(output.past_key_values)
            return output

        cache: list[Any] = []
        with mock.patch.object(model, "forward", counted):
            trainer.generate_responses(policy, prompts, sampling_config(trainer.args, None))
    step, heads = counters[-1], model.config.num_key_value_heads * (width // 8)
    tokens = rows * (context + 2)
    embedded = model.get_input_embeddings().weight.numel()
    weights = 2 * (sum(value.numel() for value in policy.parameters()) - embedded)
    ideal = weights + 2 * layers * 2 * heads * (tokens + rows)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache[-1].layers)
    return [
        Figure("decoding: casts per token", step.casts),
        Figure("decoding: bytes of casts per token", step.cast_bytes),
        Figure("decoding: bytes per token", step.total, ideal),
        Figure("decoding: bytes of the cache", kept, 2 * layers * 2 * heads * tokens),
        Figure("decoding: bytes of the policy", sum(value.nbytes for value in policy.parameters())),
    ]


def learning() -> list[Figure]:
    """Count the host's waits while a trainer learns, attending to packed rows as an accelerator does."""
    from rlhf_ppo.models import packing

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(packing, "_attend_row_by_row", packing._attend_padded),
    ):
        trainer = trainer_over(folder, 1, 64, 2048)
        learn, policy_loss, counted, parts = trainer.learn, trainer.policy_loss, [], []

        def counting(*args: Any) -> Any:
            with waits() as counter:
                result = learn(*args)
            counted.append(counter.total)
            return result

        def noting(*args: Any) -> Any:
            parts.append(1)
            return policy_loss(*args)

        trainer.learn, trainer.policy_loss = counting, noting
        trainer.train()
    return [Figure("learning: waits of the host per micro-batch", sum(counted) / len(parts))]


PARTS = {"decoding": decoding, "learning": learning}


def main() -> None:
    """Count and print a table."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {list(PARTS)}")
    arguments = parser.parse_args()
    table = [["counted", "here", "ideal", "times"], ["---"] * 4]
    for part in arguments.parts:
        for what, count, ideal in PARTS[part]():
            times = "" if ideal is None else f"{count / ideal:.2f}"
            table.append([what, f"{count:,.4g}", "" if ideal is None else f"{ideal:,.4g}", times])
    print("\n".join(f"| {' | '.join(line)} |" for line in table))


if __name__ == "__main__":
    main()
