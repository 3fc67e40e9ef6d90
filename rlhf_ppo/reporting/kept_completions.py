"""Responses of the latest update, kept until it is logged, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_ppo.algorithm.penalties import kl_estimate
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.rollout import Rollout
from rlhf_ppo.reporting.completion_files import TOKEN_VALUES


@dataclass(frozen=True)
class _Noted:
    """A rank's first responses of an update, `n` of them, copied where the rollout was made.

    Attributes:
        step: The update's number.
        prompts: Ids, left-padded, long `(n, C)`.
        responses: Ids, right-padded, long `(n, T)`.
        masks: True on the prompts' real tokens, the responses' real ones, and those that the policy wrote; on the CPU.
        per_token: Those of `TOKEN_VALUES` that are known, by name, float32 `(n, T)`.
        columns: Figures of each response, float32 `(n,)`.
        extra: What reward functions logged of each response.
    """

    step: int
    prompts: Tensor
    responses: Tensor
    masks: tuple[Any, Any, Any]
    per_token: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]
    extra: Mapping[str, Sequence[Any]]


class KeptCompletions:
    """Notes what became of each token of an update's first responses; tells it when the update is logged.

    Noting waits for no device and draws no random numbers. Texts are made for logged updates only.

    Args:
        args: Gives `num_completions_to_keep` and the KL estimator.
        tokenizer: The policy's.
        num_processes: The ranks among which the responses are shared out.
    """

    def __init__(self, args: PPOConfig, tokenizer: PreTrainedTokenizerBase, num_processes: int) -> None:
        self.tokenizer, self.kl_estimator = tokenizer, args.kl_estimator
        self._num_rows = -(-args.num_completions_to_keep // num_processes)
        self._noted: _Noted | None = None
        self._rows: list[dict[str, Any]] = []

    def note(
        self,
        step: int,
        rollout: Rollout,
        advantages: Tensor,
        rewards: Tensor,
        columns: Mapping[str, Tensor],
        extra: Mapping[str, Sequence[Any]],
    ) -> None:
        """Keep the figures of an update's first responses, in place of those of the update before.

        Args:
            step: The update's number.
            rollout: This rank's `B` responses.
            advantages: As the policy loss reads them, `(B, T)`.
            rewards: What each token was paid, before whitening, `(B, T)`.
            columns: What `episode_columns` gave.
            extra: Columns that reward functions logged, `B` values each.
        """
        number = min(self._num_rows, len(rollout))
        if number == 0:
            return
        of_tokens = {"token_value": rollout.values, "token_advantage": advantages, "token_reward": rewards}
        if rollout.ref_logprobs is not None:
            logprobs, of_reference = rollout.logprobs[:number], rollout.ref_logprobs[:number]
            of_tokens["token_kl"] = kl_estimate(logprobs, of_reference, self.kl_estimator)
        per_token = {name: values[:number].detach().float().clone() for name, values in of_tokens.items()}
        of_rows = {name: values[:number].detach().clone() for name, values in columns.items()}
        context, attention = rollout.context_length, rollout.masks.attention[:number]
        masks = attention[:, :context].copy(), attention[:, context:].copy(), rollout.masks.response[:number].copy()
        ids = rollout.query_responses[:number].clone()
        self._noted = _Noted(step, ids[:, :context], ids[:, context:], masks, per_token, of_rows, dict(extra))
        self._rows = []

    def take(self, rows: list[dict[str, Any]]) -> None:
        """Go on with the rows of an update that a run before this one has begun."""
        self._noted, self._rows = None, rows

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Return this rank's rows of an update; none, unless it is the latest one.

        Args:
            step: The update's number.

        Returns:
            A dict of JSON values for each response: `step`, `prompt` (without special tokens), `completion`, `score`
            (as it was paid), `rewards/<name>` of each source, `kl` (nats; None without a reference, as is each
            token's), `length` (tokens that the policy wrote), `ended`, `extra/<name>`; and, in lists over the
            response's tokens, `token_id`, `token_text`, `token_written` (False for what a tool or an environment
            wrote) and `TOKEN_VALUES`.
        """
        if self._noted is not None and self._noted.step == step:
            self._rows, self._noted = self._rows_of(self._noted), None
        return [row for row in self._rows if row["step"] == step]

    def _rows_of(self, noted: _Noted) -> list[dict[str, Any]]:
        ids = torch.cat([noted.prompts, noted.responses], dim=1).cpu()  # once: each copy waits for the device
        prompts, responses = (
            part.tolist() for part in ids.split([noted.prompts.shape[1], noted.responses.shape[1]], 1)
        )
        per_token = torch.stack([*noted.per_token.values()]).tolist()
        figures = dict(zip(noted.per_token, per_token, strict=True))
        in_prompt, in_response, written = (mask.tolist() for mask in noted.masks)
        columns = {name: values.tolist() for name, values in noted.columns.items()}
        rows = []
        for row in range(len(prompts)):
            prompt = list(compress(prompts[row], in_prompt[row]))
            response, own = (list(compress(values[row], in_response[row])) for values in (responses, written))
            of_tokens = {name: [None] * len(own) for name in TOKEN_VALUES} | {
                name: _of_policy(compress(values[row], in_response[row]), own) for name, values in figures.items()
            }
            rows.append(
                {
                    "step": noted.step,
                    "prompt": self.tokenizer.decode(prompt, skip_special_tokens=True),
                    "completion": self.tokenizer.decode(response),
                    "score": columns["scores"][row],
                    **{name: values[row] for name, values in columns.items() if name.startswith("rewards/")},
                    "kl": columns["kl"][row] if "kl" in columns else None,
                    "length": sum(own),
                    "ended": bool(columns["stopped"][row]),
                    **{f"extra/{name}": _plain(values[row]) for name, values in noted.extra.items()},
                    "token_id": response,
                    "token_text": texts_of_tokens(self.tokenizer, response),
                    "token_written": own,
                    **of_tokens,
                }
            )
        return rows


def texts_of_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Say what each token adds to the text.

    Args:
        tokenizer: The tokenizer.
        ids: Token ids of a text.

    Returns:
        A text for each token; empty for one that is only a part of a character, which stands at its last token.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return [str(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer.backend_tokenizer, token) or "" for token in ids]


def _of_policy(values: Iterable[float], written: list[bool]) -> list[float | None]:
    return [value if own else None for value, own in zip(values, written, strict=True)]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)
