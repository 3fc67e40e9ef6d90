"""Compare the critic's values on FrozenLake with the returns of the episodes that the same policy plays on.

    python benchmarks/critic/turns.py --seeds 5
    python benchmarks/critic/turns.py --seeds 5 --variants plain grpo

The game is `rate 0.8` of `benchmarks/learning/lake.py`: one of five moves slips. Values are those before each turn in
the last 8 updates, of episodes that the critic has not learned from. A line of `turns.jsonl` has the figures of one
variant and seed. Variants are those of `benchmarks/learning/variants.py`, beside the example's options; `no critic`,
the example's `--credit episode`; and `grpo`, TRL's GRPO with as many games and steps. Figures of a critic:

- EV: explained variance of the returns of the turns, discounted as in training, KL penalty included;
- EV of move, of field: the same for a quadratic in the move's number, and for the mean return of the other episodes
  with the same field at the same move, which knows all that the game's rules allow to know;
- tau: Kendall's tau-b between the value and that mean, among fields at the same move;
- slope, bias: slope of the returns on the values, and mean of value minus return.

`games won` is the share of 4,000 games after training.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parent / "learning"), str(FOLDER.parents[1] / "examples")]

import agent_frozen_lake as example  # noqa: E402
import intervals  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from lake import EPISODES, SETTINGS, SLIPPING  # noqa: E402
from run import code_version  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from variants import PLAIN, overrides  # noqa: E402

from rlhf_ppo.environments.tools import text_environment  # noqa: E402
from rlhf_ppo.evaluation.critic_audit import pair_counts  # noqa: E402

RESULTS = FOLDER / "turns.jsonl"
NUM_UPDATES = 8
"""Updates at the end of a run whose rollouts are read."""
MIN_OTHERS = 8
"""Other episodes with the same field at the same move, so that their mean return says something."""
LEARNING_RATE = 1e-3
"""Of the example."""
NO_CRITIC, GRPO = "no critic", "grpo"
VARIANTS = (
    PLAIN,
    "num_critic_epochs=4",
    "critic_freeze=attention",
    "value_loss=hl_gauss",
    "critic_ensemble=3",
    "critic_ensemble=3,critic_agreement_mask=0.2",
    "critic_warmup_steps=3",
    "lam_critic=1.0",
    "preset:recommended",
    "preset:sao",
    NO_CRITIC,
    GRPO,
)
Turns = list[tuple[int, int, float, float]]
"""Move's number, field, value and return of each turn."""


def turns_of(rollout: Any, gamma: float, kl_coef: float) -> Turns:
    """Return the turns of a rollout; the token before a turn names the field.

    G_k = r_k + gamma G_{k+1},   r_k = sum over the turn of (token scores - kl_coef * (log p - log p_ref))

    The last turn is paid the score, too.
    """
    turns: Turns = []
    rewards = rollout.token_scores - kl_coef * (rollout.logprobs - rollout.ref_logprobs)
    first = rollout.query_responses.shape[1] - rollout.response_mask.shape[1]
    for row, written in enumerate(rollout.response_mask.tolist()):
        starts = [place for place, mine in enumerate(written) if mine and (place == 0 or not written[place - 1])]
        to_come, of_row = 0.0, list[tuple[int, int, float, float]]()
        for move, start in reversed([*enumerate(starts)]):
            end = start + [*written[start:], False].index(False)
            paid = float(rollout.scores[row]) if move == len(starts) - 1 else 0.0
            to_come = paid + float(rewards[row, start:end].sum()) + gamma * to_come
            field = int(rollout.query_responses[row, first + start - 1])
            of_row.append((move, field, float(rollout.values[row, start]), to_come))
        turns += of_row
    return turns


def figures(turns: Turns) -> dict[str, float]:
    """Return the figures of the docstring above; turns without enough others are left out of all."""
    groups: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for move, field, value, returned in turns:
        groups[move, field].append((value, returned))
    rows: list[tuple[int, float, float, float]] = []
    ranked: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (move, _), pairs in groups.items():
        if len(pairs) <= MIN_OTHERS:
            continue
        total = sum(returned for _, returned in pairs)
        rows += [(move, value, returned, (total - returned) / (len(pairs) - 1)) for value, returned in pairs]
        ranked[move].append((float(np.mean([value for value, _ in pairs])), total / len(pairs)))
    moves, values, returns, others = np.array(rows).T
    quadratic = np.polyval(np.polyfit(moves, returns, 2), moves)
    agreement, of_values, of_means = np.sum([pair_counts(*np.array(pairs).T) for pairs in ranked.values()], axis=0)
    return {
        "EV": explained(values, returns),
        "EV of move": explained(quadratic, returns),
        "EV of field": explained(others, returns),
        "tau": float(agreement / np.sqrt(of_values * of_means)),
        "slope": float(np.polyfit(values, returns, 1)[0]),
        "bias": float(np.mean(values - returns)),
        "turns": len(rows),
    }


def explained(predicted: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(G - predicted) / Var(G)."""
    return float(1 - np.var(returns - predicted) / np.var(returns))


def measure(variant: str, seed: int) -> dict[str, Any]:
    """Train a player with this library; return the games that it wins and the figures of its critic."""
    rollouts: list[Any] = []

    class Kept(example.PPOTrainer):
        def estimate_advantages(self, rollout: Any) -> Any:
            rollouts.append((rollout, self.args))
            del rollouts[:-NUM_UPDATES]
            return super().estimate_advantages(rollout)

    words = [*shlex.split(SETTINGS["rate 0.8"]), f"--seed={seed}"]
    if variant == NO_CRITIC:
        words.append("--credit=episode")
    else:
        words.append(f"--options={json.dumps(overrides(variant, LEARNING_RATE) | SLIPPING)}")
    usual, example.PPOTrainer = example.PPOTrainer, Kept
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = example.train(example.command_line([*words, f"--output_dir={folder}"]))
    finally:
        example.PPOTrainer = usual
    measured = {"games won": found["held_out"]}
    if variant == NO_CRITIC:
        return measured
    return measured | figures(
        [turn for rollout, args in rollouts for turn in turns_of(rollout, args.gamma, args.kl_coef)]
    )


# ---- TRL's GRPO ----


class Games(NamedTuple):
    """Games of a policy: ids of the first field and of all that follows, 1 on the policy's tokens, 1 if it won."""

    prompts: list[list[int]]
    completions: list[list[int]]
    masks: list[list[int]]
    won: list[float]


@torch.no_grad()
def play(policy: Any, tokenizer: Any, given: argparse.Namespace, seeds: list[int]) -> Games:
    """Play one game for each seed, all at once; a turn ends with the stop token, a game at the limit of tokens too."""
    lake = text_environment(
        lambda: example.make_lake(given.size, given.moves, given.slippery, given.rate, given.progress),
        actions=example.MOVES,
        invalid="what ? {observation}",
    )
    limit = given.moves * 3 + 8
    lakes = [lake() for _ in seeds]
    prompts = [tokenizer(each.reset(seed=seed))["input_ids"] for each, seed in zip(lakes, seeds, strict=True)]
    completions, masks, turns = ([list[int]() for _ in seeds] for _ in range(3))
    running = [*range(len(seeds))]
    while running:
        rows = [prompts[game] + completions[game] for game in running]
        inputs = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        drawn = torch.multinomial(policy(**inputs).logits[:, -1].softmax(-1), 1)[:, 0].tolist()
        for game, token in zip([*running], drawn, strict=True):
            completions[game].append(token)
            masks[game].append(1)
            turns[game].append(token)
            if token == tokenizer.eos_token_id:
                observation = lakes[game].respond(tokenizer.decode(turns[game], skip_special_tokens=True))
                turns[game].clear()
                if not (lakes[game].done or lakes[game].truncated):
                    answer = tokenizer(observation)["input_ids"]
                    completions[game] += answer
                    masks[game] += [0] * len(answer)
            if lakes[game].done or lakes[game].truncated or len(completions[game]) >= limit:
                running.remove(game)
    return Games(prompts, completions, masks, [float(example.has_won(each.inner)) for each in lakes])


def measure_grpo(seed: int, num_generations: int = 8) -> dict[str, Any]:
    """Train a player with GRPO, by as many games and steps with the same schedule; return the games that it wins."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    given = example.command_line(shlex.split(SETTINGS["rate 0.8"]))
    torch.set_num_threads(1)
    tokenizer, dice = example.make_tokenizer(), random.Random(seed)
    mini_batches, epochs = 4, 2
    steps = mini_batches * epochs

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        games = play(trainer.model.eval(), tokenizer, given, [dice.randrange(2**31) for _ in prompts])
        trainer.model.train()
        fields = {"env_mask": games.masks, "won": games.won}
        return {"prompt_ids": games.prompts, "completion_ids": games.completions, "logprobs": None} | fields

    def reward(won: list[float], **others: Any) -> list[float]:
        return won

    with tempfile.TemporaryDirectory() as folder:
        example.make_player(tokenizer, given.size, seed).save_pretrained(folder)
        player = AutoModelForCausalLM.from_pretrained(folder)  # GRPOTrainer loads the reference from there
        args = GRPOConfig(
            folder,
            per_device_train_batch_size=EPISODES // mini_batches,
            steps_per_generation=mini_batches,
            num_iterations=epochs,
            num_generations=num_generations,
            max_steps=given.updates * steps,
            max_completion_length=given.moves * 3 + 8,
            beta=SLIPPING["kl_coef"],
            learning_rate=LEARNING_RATE,
            warmup_steps=SLIPPING["warmup_steps"] * steps,
            lr_scheduler_type=SLIPPING["lr_scheduler_type"],
            lr_scheduler_kwargs={"num_decay_steps": SLIPPING["lr_scheduler_kwargs"]["num_decay_steps"] * steps},
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            logging_steps=1000,
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        )
        rows = Dataset.from_dict({"prompt": ["?"] * (given.updates * EPISODES // num_generations)})
        trainer = GRPOTrainer(player, reward, args, rows, processing_class=tokenizer, rollout_func=rollouts)
        trainer.train()
    games = play(player.eval(), tokenizer, given, [dice.randrange(2**31) for _ in range(given.held_out)])
    return {"games won": fmean(games.won)}


def main() -> None:
    """Measure the variants and seeds that are missing; print each figure with its interval over seeds."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    given = parser.parse_args()
    rows = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.exists() else []
    for seed in range(given.seeds):
        for variant in given.variants:
            cell = {"variant": variant, "seed": seed}
            if not any(cell.items() <= row.items() for row in rows):
                found = measure_grpo(seed) if variant == GRPO else measure(variant, seed)
                rows.append(cell | found | code_version())
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    for line in tables(rows):
        print(line)


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table: means over seeds, and each variant's difference to `plain`, paired."""
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    yield f"| variant | {' | '.join(names)} | games won above plain | EV above plain |"
    yield "| " + " | ".join(["---"] * (len(names) + 3)) + " |"
    of = {
        variant: [row for row in rows if row["variant"] == variant]
        for variant in dict.fromkeys(row["variant"] for row in rows)
    }
    for variant, cells in of.items():
        shown = [intervals.mean([row[name] for row in cells]).shown() if name in cells[0] else "" for name in names]
        for name in ("games won", "EV"):
            ours, plain = ({row["seed"]: row[name] for row in side if name in row} for side in (cells, of[PLAIN]))
            compares = variant != PLAIN and ours
            shown.append(
                intervals.difference(ours, plain).shown(signed=True).removesuffix(" paired") if compares else ""
            )
        yield f"| {variant} | {' | '.join(shown)} |"


if __name__ == "__main__":
    main()
