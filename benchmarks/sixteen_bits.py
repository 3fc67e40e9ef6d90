"""Measure on a CPU what bf16 leaves of the numbers that PPO learns from, in two processes under DDP, ZeRO-2 and FSDP2.

`python -m benchmarks.sixteen_bits`, in the folder above, prints a table:

- *beyond bf16*: share of the first rollout's log-probabilities that 8 bits of mantissa could not hold. 0: rounded.
- *abs(logprob - ref)*: mean over its tokens; a policy that has not learned is its reference, so it should be 0.
- *gradient*: relative difference, in the Frobenius norm over all weights, between the gradient of 64 rows in 16
  micro-batches on each rank and in one. What is left is the rounding of single products; sums in bf16 add to it.
- *value*: root mean square error of values near 5, against float64 on the same hidden states. In one process.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_ppo.models import heads
from tests.conftest import tiny_policy, tiny_scorer
from tests.distributed import processes, scenarios
from tests.runs import record_rollouts

ENGINES = {"DDP": "multi_gpu", "ZeRO-2": "deepspeed_zero2", "FSDP2": "fsdp2"}
ROWS = 32
"""Of each rank."""


def first_update(output_dir: str, models: str, micro_batch: int) -> dict[str, Any]:
    """Take one SGD step of rate 1 in bf16; return the rollout's log-probabilities and the gradients."""
    reward_model = AutoModelForSequenceClassification.from_pretrained(f"{models}/reward_model")
    trainer = scenarios.make_trainer(
        output_dir, models, scenarios.FixedResponses, num_prompts=2 * ROWS, given={"reward_model": reward_model},
        per_device_train_batch_size=micro_batch, gradient_accumulation_steps=ROWS // micro_batch, bf16=True,
        num_ppo_epochs=1, num_mini_batches=1, max_steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
    )  # fmt: skip
    rollouts, steps = record_rollouts(trainer), scenarios.FirstStep()
    trainer.add_callback(steps)
    trainer.train()
    mask = rollouts[0].response_mask
    logprobs, ref_logprobs = (rollouts[0].logprobs[mask].float(), rollouts[0].ref_logprobs[mask].float())
    return {
        **scenarios.launched_as(trainer),
        "logprobs": logprobs.numpy(),
        "ref_logprobs": ref_logprobs.numpy(),
        "gradients": steps.gradients,
    }


def of_engine(config: str, models: Path, folder: Path) -> tuple[float, float, float]:
    """Measure one engine; see the module's text for the three figures."""
    run = {"output_dir": str(folder), "models": str(models)}
    calls = [("benchmarks.sixteen_bits.first_update", {**run, "micro_batch": size}) for size in (2, ROWS)]
    many, one = (ranks[0] for ranks in processes.run_all(config, calls, options=["--mixed_precision", "bf16"]))
    assert (many["num_processes"], many["mixed_precision"]) == (2, "bf16")
    logprobs, ref_logprobs = many["logprobs"], many["ref_logprobs"]
    squares = [
        (np.sum((many["gradients"][name] - value) ** 2), np.sum(value**2)) for name, value in one["gradients"].items()
    ]
    difference, size = np.sqrt(np.sum(squares, axis=0))
    beyond = np.mean((logprobs.view(np.uint32) & 0xFFFF) != 0)
    return float(beyond), float(np.abs(logprobs - ref_logprobs).mean()), float(difference / size)


@torch.no_grad()
def error_of_values() -> float:
    """Return the root mean square error of values near 5 under autocast."""
    model = tiny_scorer(hidden_size=64, num_attention_heads=4)
    ids = torch.randint(3, 32, (16, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        states = heads.hidden_states(model, ids, mask)
        flat = states.float().flatten(0, 1)
        model.score.weight[:] = torch.linalg.lstsq(flat, torch.full((len(flat), 1), 5.0)).solution.T
        values = heads.token_values(model, ids, mask, ids.shape[1]).values
    exact = states.double() @ model.score.weight.double()[0]
    assert 4 < float(exact.mean()) < 6
    return float((values.double() - exact).square().mean().sqrt())


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_policy().save_pretrained(folder / "policy")
        tiny_scorer(seed=2).save_pretrained(folder / "value_model")
        tiny_scorer(seed=5).save_pretrained(folder / "reward_model")
        print("| engine | beyond bf16 | abs(logprob - ref) | gradient |\n| --- | --- | --- | --- |")
        for engine, config in ENGINES.items():
            beyond, distance, difference = of_engine(config, folder, folder / config)
            print(f"| {engine} | {beyond:.0%} | {distance:.2g} | {difference:.2g} |", flush=True)
    print(f"\nvalue: {error_of_values():.2g}")


if __name__ == "__main__":
    main()
