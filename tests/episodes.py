"""Responses of several turns, between which tools write: what a subclass of PPOTrainer can answer with."""

from __future__ import annotations

import random
from typing import Any

import torch

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.rollout import Prompts, Responses
from tests.oracles import Episode

EOS = 1

WHO_WRITES = ("p", "pt", "tp", "ptp", "tpt", "ptptp", "ptpt", "tptp")
"""Turns of the policy (p) and of a tool (t), which may begin and end a response too."""


def episode_of(prompt: list[int]) -> Episode:
    """A response drawn from its prompt alone; the policy ends its turns with EOS, the last one perhaps."""
    draw = random.Random(str(prompt))
    ids, written, ended = list[int](), list[bool](), draw.random() < 0.5
    writers = draw.choice(WHO_WRITES)
    for number, who in enumerate(writers):
        turn = [draw.randrange(1 + (who == "p"), 32) for _ in range(draw.randint(1, 4))]
        if who == "p" and (ended or number < writers.rindex("p")):
            turn[-1] = EOS
        ids, written = ids + turn, written + [who == "p"] * len(turn)
    return Episode(prompt, ids, ended, written)


class RespondsInTurns(PPOTrainer):
    """Responds with `episode_of`."""

    def generate_responses(self, prompts: Prompts, *given: Any) -> Responses:
        rows = zip(prompts.input_ids, prompts.attention_mask, strict=True)
        self.episodes = [episode_of(ids[real].tolist()) for ids, real in rows]
        width = max(len(episode.response) for episode in self.episodes)
        real = torch.tensor([[t < len(e.response) for t in range(width)] for e in self.episodes])
        written = torch.tensor([[t in e.own for t in range(width)] for e in self.episodes])
        ids = torch.tensor([e.response + [0] * (width - len(e.response)) for e in self.episodes])
        return Responses(
            torch.cat((prompts.input_ids, ids), dim=1), torch.cat((prompts.attention_mask, real), dim=1), written
        )
