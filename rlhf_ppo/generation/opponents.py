"""Opponents: further responses to the same prompts, for rewards that compare the policy's response with another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_ppo.batch import Prompts, Responses
from rlhf_ppo.reproducibility import isolated_rng, upcoming_seed
from rlhf_ppo.rewards.preference import OPPONENT_COLUMNS, opponent_of


@dataclass(frozen=True)
class Opponents:
    """The opponents whose responses reward functions ask for.

    Attributes:
        kinds: Keys of `OPPONENT_COLUMNS`, each once.
        tokenizer: The policy's tokenizer.
    """

    kinds: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, functions: Iterable[Callable[..., Any]], tokenizer: PreTrainedTokenizerBase) -> Opponents:
        """Collect what the reward functions ask for."""
        asked = [opponent_of(function) for function in functions]
        return cls(tuple(kind for kind in OPPONENT_COLUMNS if kind in asked), tokenizer)

    def respond(self, prompts: Prompts, generate: Callable[[str], Responses]) -> Prompts:
        """Let every opponent respond, with random numbers of its own, so that the policy's go on as without it.

        Its seed follows from the state of the generators alone: it is another one at each call, the same after
        resuming, and takes no place in a checkpoint.

        Args:
            prompts: `B` prompts.
            generate: Samples a response to each prompt from an opponent of a kind.

        Returns:
            The prompts with one more column for each opponent: its `B` responses' texts, without special tokens.
        """
        columns = dict(prompts.columns)
        for kind in self.kinds:
            with isolated_rng(upcoming_seed(kind), device_specific=False):
                answers = generate(kind)
            rows = zip(answers.responses, answers.response_mask, strict=True)
            columns[OPPONENT_COLUMNS[kind]] = [
                str(self.tokenizer.decode(ids[real].tolist(), skip_special_tokens=True)) for ids, real in rows
            ]
        return dataclasses.replace(prompts, columns=columns)
