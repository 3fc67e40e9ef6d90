"""Reward models as reward sources: loaded, with the tokenizer that each reads, and asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.rollout import pad_right
from rlhf_ppo.models.frozen import at_work
from rlhf_ppo.models.loading import load_reward_model
from rlhf_ppo.models.unwrapping import transformers_model
from rlhf_ppo.rewards.reading import Answer, answers_of, reward_model_ids, shares_tokens, tokenizer_beside
from rlhf_ppo.rewards.scorer import MAX_SCORE, Refuse, ScoringBatch, refuse_by_raising

TokenizerFor = Callable[[Answer], PreTrainedTokenizerBase | None]


@dataclass(frozen=True)
class LoadedRewardModel:
    """A reward model and what it reads.

    Attributes:
        model: The sequence-classification model, cut down to one label.
        tokenizer: Its own tokenizer; None where it reads the policy's tokens.
        offloads: Whether its weights stay on the CPU between uses.
        scorer: What computes its scores. None until all models are made, which may copy or share its weights.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    offloads: bool = False
    scorer: nn.Module | None = None

    def made_scorer(self) -> nn.Module:
        """Return what computes its scores; a `ValueError` before it is made."""
        if self.scorer is None:
            raise ValueError("a reward model's scorer is made once all models are")
        return self.scorer


def load_reward_models(
    args: PPOConfig, reward_model: Any, reward_processing_classes: Any, tokenizer: PreTrainedTokenizerBase
) -> list[LoadedRewardModel]:
    """Load what is given by path, choose labels and tokenizers.

    Args:
        args: `reward_head` is the label to take of each model that has several: one for all of them, or one for each
            model. With `share_base_model` adapters in directories are not merged into their bases.
        reward_model: None, or one or a list of models, directories and hub names.
        reward_processing_classes: None, or one tokenizer, or a list with one, or None, for each reward model. Where it
            is None, the tokenizer saved beside the model is used if its tokens are not the policy's.
        tokenizer: The policy's tokenizer.

    Raises:
        TypeError: A tokenizer is none.
        ValueError: The lists do not have the same length, a label does not exist, or nothing loadable is there.
    """
    specs = _as_list(reward_model)
    tokenizers = _one_for_each(_as_list(reward_processing_classes), specs, "reward_processing_classes")
    labels = _one_for_each(list(args.reward_head or []), specs, "reward_head", spread=True)
    loaded: list[LoadedRewardModel] = []
    for number, (spec, own, label) in enumerate(zip(specs, tokenizers, labels, strict=True)):
        argument = "reward_model" if len(specs) == 1 else f"reward_model[{number}]"
        model = load_reward_model(spec, argument, label, merges_adapter=not args.share_base_model)
        if own is None:
            own = _own_tokenizer(spec, model, tokenizer)
        elif not isinstance(own, PreTrainedTokenizerBase):
            raise TypeError(f"reward_processing_classes holds a {type(own).__name__}; pass AutoTokenizer's")
        _check_vocabulary(model, own, argument)
        loaded.append(LoadedRewardModel(model, own))
    return loaded


class RewardModel:
    """Scores prompt and response with a reward model.

    Args:
        scorer: Gives scores `(B,)` of token ids and mask `(B, L)`: a `FrozenScorer`, placed where it runs.
        rows_per_pass: Number of rows in one forward pass.
        autocast: Makes the context of the forward passes.
        tokenizers: The policy's tokenizer and the model's own; None where it reads the policy's tokens.
        max_positions: Longest text that the model can place, in its own tokens; None if there is no limit.
        together: Makes a context that raises one process' error on all, as those of sharded models enter each forward
            pass together; every process enters it as often.
        refuse: What becomes of a score that is not finite, or beyond `MAX_SCORE`.
    """

    name = "reward_model"

    def __init__(
        self,
        scorer: nn.Module,
        rows_per_pass: int,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None,
        max_positions: int | None = None,
        together: Callable[[], AbstractContextManager[object]] = nullcontext,
        refuse: Refuse = refuse_by_raising,
    ) -> None:
        if rows_per_pass < 1:
            raise ValueError(f"rows_per_pass={rows_per_pass} must be at least 1")
        self.scorer, self.rows_per_pass, self.autocast = scorer, rows_per_pass, autocast
        self.tokenizers, self.max_positions, self.together = tokenizers, max_positions, together
        self.refuse = refuse
        self.reads_columns = tokenizers is not None

    @torch.no_grad()
    def __call__(self, batch: ScoringBatch) -> Tensor:
        """Score every row.

        Args:
            batch: `B` prompts and truncated responses.

        Returns:
            Scores, float32 `(B,)`.

        Raises:
            ValueError: The model's score of a row is not finite, or a row is too long in the model's own tokens.
        """
        if self.tokenizers is None:  # as `reward_model_ids` has it, without taking rows apart
            return self._scores(batch.query_responses, batch.attention_mask.bool())
        policy_tokenizer, tokenizer = self.tokenizers
        with self.together():
            ids, mask = self._padded(answers_of(batch, policy_tokenizer), lambda _: tokenizer)
        return self._scores(ids.to(batch.query_responses.device), mask.to(batch.query_responses.device))

    @torch.no_grad()
    def score_answers(self, answers: Sequence[Answer], tokenizer_for: TokenizerFor) -> Tensor:
        """Score answers one by one, as `__call__` scores a batch.

        Args:
            answers: `B` answers.
            tokenizer_for: Gives the model's own tokenizer, or None where it reads the tokens of the policy that gave
                the answer.

        Returns:
            Scores, float32 `(B,)`.

        Raises:
            ValueError: As `__call__`.
        """
        device = next(self.scorer.parameters()).device
        ids, mask = self._padded(answers, tokenizer_for)
        return self._scores(ids.to(device), mask.to(device))

    def _scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        scores: list[Tensor] = []
        with at_work(self.scorer), self.autocast():
            for start in range(0, len(ids), self.rows_per_pass):
                rows = slice(start, start + self.rows_per_pass)
                used = mask[rows].any(dim=0)  # columns that are padding in every row of this pass cost time only
                scores.append(self.scorer(ids[rows][:, used], mask[rows][:, used]))
        with self.together():
            return self._checked(torch.cat(scores).float())

    def _checked(self, score: Tensor) -> Tensor:
        unusable = ~(score.abs() <= MAX_SCORE)  # NaN too
        for row in unusable.nonzero().flatten().tolist():
            self.refuse(
                f"the {self.name.replace('_', ' ')}'s score of row {row} is {score[row].item()}: load it in float32 "
                "or bfloat16, and check its weights"
            )
        return score.masked_fill(unusable, torch.nan)

    def _padded(self, answers: Sequence[Answer], tokenizer_for: TokenizerFor) -> tuple[Tensor, Tensor]:
        rows: list[Tensor] = []
        for row, answer in enumerate(answers):
            try:
                ids = reward_model_ids(answer, tokenizer_for(answer))
            except ValueError as error:
                raise ValueError(f"row {row}: {error}") from error
            if self.max_positions is not None and len(ids) > self.max_positions:
                raise ValueError(
                    f"row {row} has {len(ids)} tokens for the reward model, which has {self.max_positions} positions: "
                    "lower max_prompt_length or response_length"
                )
            rows.append(torch.tensor([ids], dtype=torch.long))
        return pad_right(rows), pad_right([torch.ones_like(row) for row in rows]).bool()


def _own_tokenizer(
    spec: Any, model: nn.Module, policy_tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    path = transformers_model(model).config._name_or_path if isinstance(spec, nn.Module) else spec
    runs_code = type(transformers_model(model)).__module__.startswith("transformers_modules")  # as the user allowed
    found = tokenizer_beside(path, trust_remote_code=runs_code)
    return None if found is None or shares_tokens(policy_tokenizer, found) else found


def _check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, argument: str) -> None:
    if tokenizer is None:
        return
    size = transformers_model(model).config.get_text_config().vocab_size
    largest = max(number for number in tokenizer.get_vocab().values() if number != tokenizer.pad_token_id)
    if largest >= size:
        raise ValueError(
            f"{argument} has {size} token ids, but its tokenizer makes ids up to {largest}: pass its own tokenizer in "
            "reward_processing_classes"
        )


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _one_for_each(values: list[Any], specs: Sequence[Any], argument: str, spread: bool = False) -> list[Any]:
    if not values:
        return [None] * len(specs)
    if spread and len(values) == 1 and specs:
        return values * len(specs)
    if len(values) != len(specs):
        raise ValueError(f"{argument} has {len(values)} entries for {len(specs)} reward models; give one for each")
    return values
