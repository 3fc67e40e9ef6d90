"""Decoding with a trained critic: best of n, and value-guided search.

Save the critic with `save_critic=True`; load it with `AutoModelForSequenceClassification.from_pretrained`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhf_ppo.data.prompts import PromptEncoder, Prompts, check_lengths, smallest
from rlhf_ppo.generation.sampling import join_responses
from rlhf_ppo.generation.transformers_engine import sample_responses
from rlhf_ppo.models.capabilities import position_limit, shared_vocabulary
from rlhf_ppo.models.heads import check_critic_head
from rlhf_ppo.models.policy_and_value import response_values
from rlhf_ppo.models.unwrapping import in_eval_mode


@dataclass(frozen=True)
class Sampling:
    """Settings of the generation.

    Attributes:
        max_new_tokens: Longest response, tokens.
        temperature: Sampling temperature; use that of training, for which the critic's values hold.
        top_k: Sample from the k most likely tokens; 0: from all.
        top_p: Probability mass of nucleus sampling.
        stop_token_id: Token that ends a response; None: the tokenizer's EOS.
        batch_size: Rows of a batch.
        chat_template_kwargs: Further arguments of the chat template; use those of training.
    """

    max_new_tokens: int = 53
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    stop_token_id: int | None = None
    batch_size: int = 64
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} must be positive: candidates must differ")


@dataclass(frozen=True)
class Candidate:
    """A response, whole or in part.

    Attributes:
        ids: Its token ids, the stop token included.
        value: The critic's expectation of its return; see `values_of`.
        is_finished: Whether it has ended, or has `max_new_tokens`.
    """

    ids: list[int]
    value: float = float("nan")
    is_finished: bool = False


_VALUE = operator.attrgetter("value")


@dataclass(frozen=True)
class Decoded:
    """Responses to prompts, and the cost of finding them.

    Attributes:
        texts: The chosen responses, without special tokens.
        chosen: The same as candidates.
        candidates: All finished candidates of each prompt.
        num_sampled_tokens: Tokens that the policy sampled.
        num_valued_rows: Rows that the critic read.
    """

    texts: list[str]
    chosen: list[Candidate]
    candidates: list[list[Candidate]] = field(repr=False)
    num_sampled_tokens: int
    num_valued_rows: int


def best_of_n(
    policy: nn.Module,
    critic: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    n: int = 8,
    sampling: Sampling | None = None,
    *,
    weighted: bool = False,
    answer: Callable[[str], Hashable] = str.strip,
) -> Decoded:
    """Sample `n` responses to each prompt and choose the one that the critic values most.

    A noisy critic's largest value is often an error: where many responses share one right answer, `weighted=True` adds
    up the values of equal answers and chooses the answer with the largest sum (Li et al., 2206.02336, section 3.2).

    Args:
        policy: A causal language model.
        critic: The value model, over the policy's tokens.
        tokenizer: The policy's tokenizer.
        prompts: Texts, conversations, or rows with `input_ids`, `prompt` or `text`.
        n: Responses to each prompt.
        sampling: Settings of the generation.
        weighted: Whether to add up the values of equal answers. Values are shifted by the prompt's smallest one if
            that is negative.
        answer: Takes a response's text and returns its answer.

    Raises:
        ValueError: `n` is below 1, the critic has several labels or lacks tokens, or a prompt is too long.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    search = _Search(policy, critic, tokenizer, prompts, sampling or Sampling())
    found = search.extend([[Candidate([])] for _ in prompts], n, search.how.max_new_tokens)
    chosen = [_heaviest(each, search.text, answer) if weighted else max(each, key=_VALUE) for each in found]
    return search.result(chosen, found)


def value_guided_search(
    policy: nn.Module,
    critic: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    width: int = 4,
    block: int = 8,
    sampling: Sampling | None = None,
    *,
    keep: int = 1,
) -> Decoded:
    """Sample blocks of tokens; after each block keep the beginnings that the critic values most.

    Each round samples `width` blocks for each prompt, `width / keep` behind each beginning that is kept. Finished
    responses stay candidates with their value. It samples about as many tokens as best of `width`.

    Value-guided search, 2505.17373; PPO-MCTS, 2309.15028, uses PPO's critic in the same role.

    Args:
        policy: A causal language model.
        critic: The value model, over the policy's tokens.
        tokenizer: The policy's tokenizer.
        prompts: Texts, conversations, or rows with `input_ids`, `prompt` or `text`.
        width: Blocks sampled for each prompt in a round; a multiple of `keep`.
        block: Tokens of a block.
        sampling: Settings of the generation.
        keep: Beginnings that are kept.

    Raises:
        ValueError: A number is too small, `keep` does not divide `width`, the critic has several labels or lacks
            tokens, or a prompt is too long.
    """
    if block < 1 or keep < 1 or width < keep or width % keep:
        raise ValueError(f"width={width} must be a positive multiple of keep={keep}, and block={block} at least 1")
    search = _Search(policy, critic, tokenizer, prompts, sampling or Sampling())
    kept: list[list[Candidate]] = [[Candidate([])] for _ in prompts]
    finished: list[list[Candidate]] = [[] for _ in prompts]
    while any(not each.is_finished for beginnings in kept for each in beginnings):
        extended = search.extend(kept, width, block)
        for row, candidates in enumerate(extended):
            kept[row] = sorted(candidates, key=_VALUE, reverse=True)[:keep]
            finished[row] += [each for each in candidates if each.is_finished and each not in finished[row]]
    return search.result([max(each, key=_VALUE) for each in finished], finished)


def _heaviest(
    candidates: Sequence[Candidate], text: Callable[[Candidate], str], answer: Callable[[str], Hashable]
) -> Candidate:
    """Return the most valued candidate of the answer with the largest sum of values."""
    shift = min(0.0, *(each.value for each in candidates))
    of_answer: dict[Hashable, list[Candidate]] = {}
    for each in candidates:
        of_answer.setdefault(answer(text(each)), []).append(each)
    group = max(of_answer.values(), key=lambda equal: sum(each.value - shift for each in equal))
    return max(group, key=_VALUE)


class _Search:
    """Samples continuations of candidates, and values them.

    Attributes:
        how: Settings of the generation.
    """

    def __init__(
        self,
        policy: nn.Module,
        critic: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[Any],
        how: Sampling,
    ) -> None:
        check_critic_head(critic, "critic")
        PartialState()  # whose absence is an error of accelerate's loggers
        pad: Any = tokenizer.pad_token_id
        ids = shared_vocabulary({"model": policy, "critic": critic}, None, tokenizer, -1 if pad is None else pad, None)
        encode = PromptEncoder(tokenizer, "prompts", ids.size, ids.limited_by, how.chat_template_kwargs)
        given = (each if isinstance(each, Mapping) else {"prompt": each} for each in prompts)
        self.prompts = [encode(each, row)["input_ids"] for row, each in enumerate(given)]
        self.policy, self.critic, self.tokenizer, self.how = policy, critic, tokenizer, how
        self.never_sampled = ids.never_sampled
        limit = smallest(map(position_limit, (policy, critic)))
        fix = "lower max_new_tokens, or leave out long prompts"
        check_lengths(max(map(len, self.prompts), default=0), how.max_new_tokens, limit, "max_new_tokens", fix)
        eos: Any = tokenizer.eos_token_id
        self.stop: int | None = eos if how.stop_token_id is None else how.stop_token_id
        self.device = next(policy.parameters()).device
        self.num_sampled_tokens = self.num_valued_rows = 0

    def text(self, candidate: Candidate) -> str:
        """Decode a candidate."""
        return str(self.tokenizer.decode(candidate.ids, skip_special_tokens=True))

    def result(self, chosen: list[Candidate], candidates: list[list[Candidate]]) -> Decoded:
        """Put the chosen candidates and the cost together."""
        texts = [self.text(each) for each in chosen]
        return Decoded(texts, chosen, candidates, self.num_sampled_tokens, self.num_valued_rows)

    def extend(self, beginnings: list[list[Candidate]], width: int, block: int) -> list[list[Candidate]]:
        """Return each prompt's finished candidates, and `width / len` continuations of each other one, with values."""
        rows = [
            (row, each)
            for row, candidates in enumerate(beginnings)
            for each in candidates
            if not each.is_finished
            for _ in range(width // len(candidates))
        ]
        found = [[each for each in candidates if each.is_finished] for candidates in beginnings]
        rows.sort(key=lambda one: len(one[1].ids))  # equal lengths together: a block may not pass max_new_tokens
        for start in range(0, len(rows), self.how.batch_size):
            batch = rows[start : start + self.how.batch_size]
            for (row, _), candidate in zip(batch, self._continue(batch, block), strict=True):
                found[row].append(candidate)
        return found

    @torch.no_grad()
    def _continue(self, batch: Sequence[tuple[int, Candidate]], block: int) -> list[Candidate]:
        most = self.how.max_new_tokens
        ids = [self.prompts[row] + candidate.ids for row, candidate in batch]
        prompts = Prompts.of_rows(ids, 0, self.device)
        length = min(block, most - min(len(candidate.ids) for _, candidate in batch))
        config = GenerationConfig(
            max_new_tokens=length, do_sample=True, use_cache=True, eos_token_id=self.stop,
            pad_token_id=0 if self.stop is None else self.stop, temperature=self.how.temperature,
            top_k=self.how.top_k, top_p=self.how.top_p, suppress_tokens=self.never_sampled,
        )  # fmt: skip
        sampled = sample_responses(self.policy, prompts, config, len(batch))
        real = join_responses(prompts, sampled, self.stop, 0).response_mask
        whole: list[Candidate] = []
        for (_, before), row, mask in zip(batch, sampled.tolist(), real.sum(dim=1).tolist(), strict=True):
            tokens = (before.ids + row[:mask])[:most]
            self.num_sampled_tokens += len(tokens) - len(before.ids)
            whole.append(Candidate(tokens, is_finished=len(tokens) == most or tokens[-1] == self.stop))
        responses, of_rows = [each.ids for each in whole], [self.prompts[row] for row, _ in batch]
        values = values_of(self.critic, of_rows, responses, [ids[-1] == self.stop for ids in responses])
        self.num_valued_rows += len(whole)
        return [replace(each, value=value) for each, value in zip(whole, values.tolist(), strict=True)]


@torch.no_grad()
def values_of(
    critic: nn.Module,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    ended: Sequence[bool],
) -> Tensor:
    """Estimate the return of responses: the critic's value after the last token.

    Training never teaches the value after a stop token, so a response that has ended gets the value before it.

    Args:
        critic: The value model.
        prompts: Token ids of `B` prompts.
        responses: Token ids of `B` responses or beginnings, at least one each.
        ended: Whether each response ends in its stop token.

    Returns:
        float32 `(B,)`, in the reward's unit.
    """
    device, width = next(critic.parameters()).device, max(len(ids) for ids in responses)
    padded = [[*ids, *[0] * (width - len(ids))] for ids in responses]
    before_them = Prompts.of_rows(prompts, 0, device)
    ids = torch.cat((before_them.input_ids, torch.tensor(padded, device=device)), dim=1)
    lengths = torch.tensor([len(each) for each in responses], device=device)
    written = torch.arange(width, device=device) < lengths[:, None]
    real = torch.cat((before_them.attention_mask, written), dim=1)
    with in_eval_mode(critic):
        before, after, *_ = response_values(critic, ids, real, written)
    last = before.gather(1, lengths[:, None] - 1).squeeze(1)
    return torch.where(torch.tensor(ended, device=device), last, after)
