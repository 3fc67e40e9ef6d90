"""PPO-ptx: a language-modeling loss on texts beside PPO, which preserves earlier abilities of the policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_ppo.config.ppo_config import Sizes
from rlhf_ppo.data.prompts import as_the_template_reads, template_settings
from rlhf_ppo.data.rollout import PositionLimit, Responses, micro_batch_rows
from rlhf_ppo.ranks.processes import get_logger
from rlhf_ppo.ranks.random_streams import derive_seed
from rlhf_ppo.reporting.metrics import UpdateStatistics
from rlhf_ppo.run.external import padded_responses
from rlhf_ppo.run.learning import CriticOnly, accumulate, backward
from rlhf_ppo.run.run_state import RunState

logger = get_logger(__name__)

MAX_LENGTH = 1024
"""Largest number of tokens of a text, as in `SFTTrainer`."""

_MASKS = "completion_mask", "assistant_masks"
_TEXT_COLUMNS = ("prompt", "completion"), ("messages",), ("text",)


class Text(NamedTuple):
    """Token ids of a text.

    Attributes:
        context: Tokens before the first one that is learned: the prompt, or the first token.
        rest: Tokens from there to the last one that is learned.
        is_learned: Whether each of them is learned.
    """

    context: list[int]
    rest: list[int]
    is_learned: list[bool]


def prepare_texts(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[Text]:
    """Tokenize every row; append EOS to texts that are not conversations, as `SFTTrainer` does.

    Args:
        dataset: Rows with `text`, `prompt` and `completion`, `messages`, or `input_ids` (and `completion_mask`,
            `assistant_masks`, or `labels` with -100); conversations may have `tools` and `chat_template_kwargs`.
        tokenizer: The policy's tokenizer.
        longest: Tokens after which a text is cut.
        template_kwargs: Further arguments of the chat template, or None.

    Returns:
        Rows with at least one learned token; shorter rows are left out, with a warning.

    Raises:
        ValueError: A row has none of these forms, or no row is left.
    """
    texts, num_cut = [], 0
    for index in range(len(dataset)):
        ids, is_learned = _encoded(dataset[index], tokenizer, index, template_kwargs)
        num_cut += len(ids) > longest
        places = [place for place in range(1, min(len(ids), longest)) if is_learned[place]]
        if places:
            first, end = places[0], places[-1] + 1
            texts.append(Text(ids[:first], ids[first:end], is_learned[first:end]))
    if not texts:
        raise ValueError("no row of ptx_dataset has a token to learn: each needs two tokens or more")
    num_left_out = len(dataset) - len(texts)
    if num_cut or num_left_out:
        logger.warning(
            f"ptx_dataset: of {len(dataset)} rows, {num_cut} are cut to {longest} tokens, and {num_left_out} are left "
            "out because they have no token to learn"
        )
    return texts


def _encoded(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, index: int, template_kwargs: Mapping[str, Any] | None
) -> tuple[list[int], list[bool]]:
    """Return a row's token ids, and whether each is learned."""
    from trl.data_utils import is_conversational, maybe_apply_chat_template

    if row.get("input_ids") is not None:
        ids, masks = list(row["input_ids"]), [row[name] for name in _MASKS if row.get(name) is not None]
        if row.get("labels") is not None:
            masks.append([label != -100 for label in row["labels"]])
        return ids, [all(of_token) for _, *of_token in zip(ids, *masks, strict=True)]
    form = next((form for form in _TEXT_COLUMNS if all(row.get(column) is not None for column in form)), None)
    if form is None:
        raise ValueError(
            f"row {index} of ptx_dataset has the columns {sorted(row)}; it needs 'text', 'prompt' and 'completion', "
            "'messages', or 'input_ids'"
        )
    example: Any = {column: row[column] for column in form}
    is_chat = is_conversational(example)
    if is_chat:
        settings = template_settings(row, template_kwargs)
        example = {column: as_the_template_reads(example[column], tokenizer, None, settings) for column in form}
        example = maybe_apply_chat_template(example, tokenizer, **settings)
    last = "completion" if "prompt" in example else "text"
    if not is_chat and tokenizer.eos_token and not example[last].endswith(str(tokenizer.eos_token)):
        example[last] += tokenizer.eos_token

    def ids_of(text: str) -> Any:
        return tokenizer(text, add_special_tokens=not is_chat)["input_ids"]

    whole = ids_of(example.get("prompt", "") + example[last])
    if last == "text":
        return whole, [True] * len(whole)
    pairs = zip(ids_of(example["prompt"]), whole, strict=False)
    common = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)  # tokens may merge at the prompt's end
    num_context = sum(1 for _ in common)
    return whole, [place >= num_context for place in range(len(whole))]


class LanguageModeling:
    """Add `ptx_coef` times the mean negative log-likelihood of texts to each optimizer step.

        L = L_PPO - ptx_coef mean_t log pi(x_t | x_<t),    at temperature 1

    The number of rows of `ptx_dataset` equals the mini-batch's episodes; they run in micro-batches of the same size,
    with backward passes before PPO's. The mean is over the learned tokens of all ranks. Each pass over the rows has
    its own order, which depends on the seed only. Ouyang et al., *Training language models to follow instructions with
    human feedback* (arXiv 2203.02155), section 3.5.

    Args:
        run: The run.
        sizes: Sizes of an update.
        critic_only: Tells when only the value model learns, which skips this loss.
        longest_sequence: Longest sequence that every model supports, or None.
        dataset: `ptx_dataset`.
    """

    def __init__(
        self,
        run: RunState,
        sizes: Sizes,
        critic_only: CriticOnly,
        longest_sequence: PositionLimit | None,
        dataset: Any,
    ) -> None:
        self.run, self.sizes, self.critic_only, self.num_drawn = run, sizes, critic_only, 0
        self._orders: dict[int, Sequence[int]] = {}
        longest = MAX_LENGTH if longest_sequence is None else min(MAX_LENGTH, longest_sequence.tokens)
        self.texts = prepare_texts(dataset, run.tokenizer, longest, run.template_kwargs)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the number of used rows, on all ranks."""
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self.num_drawn = int(state["num_drawn"])

    def learn(
        self,
        model: nn.Module,
        statistics: UpdateStatistics,
        forward_context: Callable[[], AbstractContextManager[object]],
    ) -> Tensor | float:
        """Add the gradients of the next rows to those of the optimizer step.

        Args:
            model: The prepared model.
            statistics: Receives the sum of the negative log-likelihoods, and the number of tokens.
            forward_context: Context of forward passes.

        Returns:
            The loss as the step sums it; 0 where only the value model learns.
        """
        if self.critic_only.warms_up:
            return 0.0
        run, coef = self.run, self.run.args.ptx_coef
        rows = self.next_rows()
        num_tokens = run.sum_over_ranks(rows.response_mask.sum())
        total = torch.zeros((), device=rows.response_mask.device)
        args, models = run.args, run.models
        cut = (args.per_device_train_batch_size, args.max_tokens_per_micro_batch, run.gather)
        # DeepSpeed keeps the last step's gradient of a parameter without a part in a step's first backward pass.
        only = None if run.accelerator.distributed_type == DistributedType.DEEPSPEED else "policy"
        for part_rows in micro_batch_rows(rows, *cut, models.packs_rows, models.shares_prefixes):
            part = rows[part_rows].trimmed()
            with accumulate(run.accelerator, model, False, args):
                with forward_context():
                    output = model(*part.batch, only=only, places=part.places, temperature=1.0)
                    nll = -output.logprobs.sum()  # 0 on context
                    idle = 0.0 if only else 0.0 * output.values.sum()
                backward(run.accelerator, coef * nll / num_tokens + idle)
                total += nll.detach()
        statistics.ptx.append(torch.stack([total, rows.response_mask.sum().float()]))
        return coef * total / num_tokens * run.accelerator.num_processes

    def count_step(self) -> None:
        """Count the rows of a completed step; an interrupted step uses the same rows again."""
        if not self.critic_only.warms_up:
            self.num_drawn += self.sizes.mini_batch_size

    def next_rows(self) -> Responses:
        """Return this rank's rows of the next step, the longest first."""
        run, number = self.run, self.sizes.local_mini_batch_size
        first = self.num_drawn + run.accelerator.process_index * number
        texts = [self.text_at(index) for index in range(first, first + number)]
        context, rest, masks = ([torch.tensor(part) for part in parts] for parts in zip(*texts, strict=True))
        rows = padded_responses(context, rest, masks, run.tokens.pad, run.args.device)
        return rows[rows.longest_first()]

    def text_at(self, index: int) -> Text:
        """Return a text by its position in the order of all passes."""
        number, position = divmod(index, len(self.texts))
        if number not in self._orders:
            args = self.run.args
            seed = derive_seed("ptx", args.seed if args.data_seed is None else args.data_seed, number)
            order = torch.randperm(len(self.texts), generator=torch.Generator().manual_seed(seed)).tolist()
            self._orders = {last: self._orders[last] for last in self._orders if last == number - 1} | {number: order}
        return self.texts[self._orders[number][position]]
