"""Opponents: who else responds to the same prompts, for rewards that compare the policy's response with another.

The word is that of self-play (Wu et al., arXiv 2405.00675): the reference, or the policy once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.data.rollout import Responses
from rlhf_ppo.processes.random_numbers import isolated_rng, upcoming_seed
from rlhf_ppo.rewards.preference import OPPONENT_COLUMNS, opponent_of
from rlhf_ppo.rewards.scorer import selected


@dataclass(frozen=True)
class Opponents:
    """The opponents whose responses reward functions ask for.

    Attributes:
        kinds: Keys of `OPPONENT_COLUMNS`, each once.
        tokenizer: The policy's tokenizer.
        ended: Tells which responses ended by themselves, bool `(B,)`.
    """

    kinds: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase
    ended: Callable[[Responses], Tensor]

    @classmethod
    def of(
        cls,
        functions: Iterable[Callable[..., Any]],
        tokenizer: PreTrainedTokenizerBase,
        ended: Callable[[Responses], Tensor],
    ) -> Opponents:
        """Collect what the reward functions ask for."""
        asked = [opponent_of(function) for function in functions]
        return cls(tuple(kind for kind in OPPONENT_COLUMNS if kind in asked), tokenizer, ended)

    def respond(self, prompts: Prompts, generate: Callable[[str], Responses]) -> Prompts:
        """Let every opponent respond, with random numbers of its own, so that the policy's go on as without it.

        Its seed follows from the state of the generators alone: it is another one at each call, the same after
        resuming, and takes no place in a checkpoint.

        Args:
            prompts: `B` prompts.
            generate: Samples a response to each prompt from an opponent of a kind.

        Returns:
            The prompts with four more columns for each opponent: its `B` responses' texts, without special tokens;
            with `_ids` behind the name, their token ids; with `_written`, which of these the opponent wrote; with
            `_ended`, whether they ended by themselves.
        """
        columns = dict(prompts.columns)
        for kind in self.kinds:
            with isolated_rng(upcoming_seed(kind), device_specific=False):
                answers = generate(kind)
            response_ids = selected(answers.responses, answers.episode_mask)
            name = OPPONENT_COLUMNS[kind]
            columns[name] = self.tokenizer.batch_decode(response_ids, skip_special_tokens=True)
            columns[f"{name}_ids"], columns[f"{name}_ended"] = response_ids, self.ended(answers).tolist()
            columns[f"{name}_written"] = selected(answers.response_mask, answers.episode_mask)
        return dataclasses.replace(prompts, columns=columns)
