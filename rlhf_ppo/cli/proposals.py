"""Sizes, learning rates and steps of a pipeline that fit measured data, a model, a machine and a time limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_ppo.cli.measuring import Data, Machine, quantile

BATCH = 64
"""Largest number of episodes of an update, and of rows of an optimizer step."""
MAX_RESPONSE, MAX_TEXT = 256, 1024
SECONDS_TO_START = 15
"""Seconds of a step for imports, loading and saving."""
BYTES_PER_PARAMETER = 40
"""Of PPO in float32: policy and value model with gradients and AdamW's state, reference and reward model."""
PPO_EPOCHS = 4
MIN_UPDATES, MAX_UPDATES = 20, 200
"""Of PPO."""
MIN_STEPS = 50
"""Optimizer steps of SFT and of a reward model, if the data suffice."""
SHORTENED, SMALLEST_BATCH = 32, 16
"""Tokens of a response, and episodes of an update, that are not made fewer to save time."""
SHARES = {"sft": 0.15, "reward": 0.2, "judge_reward": 0.2}
"""Largest shares of the time for the steps before PPO."""


@dataclass(frozen=True)
class Proposal:
    """Values of a pipeline's file.

    Attributes:
        sections: Options of each training step and of the judge; `common` is for all training steps.
        minutes: Expected minutes of each step.
        notes: Sentences about data or memory that do not fit, each with its steps.
    """

    sections: Mapping[str, Mapping[str, Any]]
    minutes: Mapping[str, float]
    notes: Mapping[str, Sequence[str]]


def propose(machine: Machine, data: Mapping[str, Data], num_held_out: int, num_seeds: int, minutes: float) -> Proposal:
    """Propose the options of a pipeline.

    Args:
        machine: The model on this machine.
        data: The data of `sft`, `reward`, `judge_reward` and `ppo`, as far as there are any.
        num_held_out: Prompts for the judge.
        num_seeds: Runs of PPO.
        minutes: About how long all steps may take.
    """
    notes: dict[str, list[str]] = {}
    seconds = 60 * minutes
    response = _response_length(machine, data)
    needed = machine.parameters * BYTES_PER_PARAMETER
    has_room = 4 * needed < machine.memory
    sections: dict[str, dict[str, Any]] = {"common": {"gradient_checkpointing": False} if has_room else {}}
    took: dict[str, float] = {}
    for name in ("sft", "reward", "judge_reward"):
        if name in data:
            wanted = SHARES[name] * seconds
            sections[name], took[name] = _training(name, data[name], machine, wanted, notes)
    longest, batch = response, min(BATCH, _power(len(data["ppo"].rows)))
    while True:
        judge_seconds = SECONDS_TO_START + _answering(machine, response, num_held_out)
        left = seconds - sum(took.values()) - num_seeds * judge_seconds - SECONDS_TO_START
        sections["ppo"], each = _ppo(data["ppo"], machine, response, batch, left / num_seeds)
        if num_seeds * each <= left or (response <= SHORTENED and batch <= SMALLEST_BATCH):
            break
        if response > SHORTENED:
            response = max(SHORTENED, response // 2)
        else:
            batch //= 2
    if response < longest:
        _note(notes, "ppo", f"responses end after {response} tokens, not {longest}, to save time (--minutes).")
    if room := sections["ppo"].get("max_prompt_length"):
        share = sum(length > room for length in data["ppo"].prompts) / len(data["ppo"].prompts)
        _note(notes, "ppo", f"{share:.0%} of the prompts are longer than {room} tokens and are left out.")
    took |= {"ppo": num_seeds * each, "judge": num_seeds * judge_seconds, "report": SECONDS_TO_START}
    sections["judge"] = {"num_prompts": num_held_out, "max_new_tokens": response}
    if needed > machine.memory:
        memory = f"all weights need about {needed / 2**30:.0f} GiB, and {machine.memory / 2**30:.0f} GiB are free."
        _note(notes, "ppo", f"{memory} Use LoRA (use_peft: true in `ppo`), or several devices (launch).")
    return Proposal(sections, {name: value / 60 for name, value in took.items()}, notes)


def _note(notes: dict[str, list[str]], step: str, note: str) -> None:
    notes.setdefault(note, []).append(step)


def learning_rate(at_a_billion: float, parameters: int) -> float:
    """Return a learning rate that falls with the root of the model's size, rounded to one digit, at most 0.002."""
    rate = min(at_a_billion * math.sqrt(1e9 / parameters), 2e-3)
    digit = 10 ** math.floor(math.log10(rate))
    return round(rate / digit) * digit


def _response_length(machine: Machine, data: Mapping[str, Data]) -> int:
    """Return a length that nine of ten responses of the data do not exceed and that fits into the model."""
    source = data.get("reward") or data.get("sft")
    length = 128 if source is None else quantile(source.responses, 0.9) + 1
    prompts = data["ppo"].prompts
    room = (machine.positions or 10**9) - quantile(prompts, 0.95)
    largest = min(MAX_RESPONSE, max(room, (machine.positions or 10**9) // 2))
    return max(4, min(_rounded_up(length, 4), largest))


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _power(number: float) -> int:
    """Return the largest power of two that is not above a number, at least 1."""
    return 2 ** max(0, math.floor(math.log2(max(number, 1))))


def _training(
    name: str, data: Data, machine: Machine, seconds: float, notes: dict[str, list[str]]
) -> tuple[dict[str, Any], float]:
    """Propose SFT or a reward model: up to three epochs, and fewer in the time that is given."""
    limit = min(MAX_TEXT, machine.positions or MAX_TEXT)
    length = min(_rounded_up(quantile(data.totals, 0.98) + 2, 8), limit)
    if too_long := sum(total + 2 > length for total in data.totals) / len(data.totals):
        if too_long > 0.05:
            action = "are cut" if name == "sft" else "are left out"
            _note(notes, name, f"{too_long:.0%} of the rows are longer than {length} tokens and {action}.")
    if name != "sft" and len(data.rows) < 1000:
        few = "fewer than 1,000 pairs. A reward model of human preferences needs thousands; its accuracy will tell."
        _note(notes, name, few)
    rows = len(data.rows) if name == "sft" else len(data.rows) * 9 // 10  # a tenth of the pairs is held out
    epochs = 1 if rows > 50_000 else 2 if rows > 10_000 else 3
    batch = max(4, min(_power(rows * epochs / 200), BATCH // (1 if name == "sft" else 2)))
    mean = sum(min(total, length) for total in data.totals) / len(data.totals)
    tokens = mean * (1.3 if name == "sft" else 2.6)  # padding; both responses
    step = machine.training(int(batch * tokens)) * 1.25
    every = max(1, rows * epochs // batch)
    updates = max(min(MIN_STEPS, every), min(int((seconds - SECONDS_TO_START) / step), every))
    if updates < every:
        epochs = max(round(updates * batch / rows, 2), 0.01)
        updates = max(1, round(epochs * rows / batch))
    options = {
        "num_train_epochs": epochs,
        "learning_rate": learning_rate(2e-5 if name == "sft" else 1e-5, machine.parameters),
        "per_device_train_batch_size": batch,
        "max_length": length,
        "save_steps": max(10, _rounded_up(updates // 4, 10)),
    }
    return options, SECONDS_TO_START + updates * step


def _ppo(data: Data, machine: Machine, response: int, batch: int, seconds: float) -> tuple[dict[str, Any], float]:
    """Propose PPO, and its seconds: as many updates as the time allows, from 20 to 200."""
    longest = max(data.prompts)
    prompt = quantile(data.prompts, 0.95)
    options: dict[str, Any] = {"response_length": response}
    room = None if machine.positions is None else machine.positions - response
    if room is not None and longest > room:
        options["max_prompt_length"] = room
        prompt = min(prompt, room)
    row_bytes = 4 * 60 * (prompt + response) * math.sqrt(machine.parameters)  # activations, roughly
    free = machine.memory - machine.parameters * BYTES_PER_PARAMETER
    per_device = max(1, min(batch, _power(free / 2 / row_bytes)))
    tokens = batch * (prompt + response)
    passes = 2 * PPO_EPOCHS * (batch // per_device)  # policy and value model
    learning = passes * machine.training(tokens // (batch // per_device))
    each = _answering(machine, response, batch) + 3 * machine.forward(tokens) + 1.25 * learning
    updates = min(MAX_UPDATES, max(MIN_UPDATES, int((seconds - SECONDS_TO_START) / each)))
    options |= {
        "learning_rate": learning_rate(3e-6, machine.parameters),
        "total_episodes": updates * batch,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": batch // per_device,
        "save_steps": max(5, _rounded_up(updates // 4, 5)),
    }
    return options, SECONDS_TO_START + updates * each


def _answering(machine: Machine, response: int, rows: int) -> float:
    """Return the seconds to sample responses to a batch of prompts, 64 at a time."""
    return -(-rows // BATCH) * response * 1.5 * machine.forward(BATCH)
