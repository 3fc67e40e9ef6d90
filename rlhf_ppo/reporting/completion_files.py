"""Responses of logged updates, token by token: kept until the log, and written to `_completions/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.conversation import EPISODE_COLUMN, as_json
from rlhf_ppo.data.files import replacing
from rlhf_ppo.data.rollout import Rollout

COMPLETIONS_DIR = "_completions"
"""The directory of the responses in `output_dir`; `push_to_hub` does not upload it."""
NUM_KEPT_COMPLETIONS = 32
"""Number of responses of each logged update that are kept."""

TOKEN_VALUES = ("token_value", "token_advantage", "token_kl", "token_reward")
"""Values of each token that the policy wrote; null for others."""

_FLOATS, _INTS = pa.list_(pa.float32()), pa.list_(pa.int32())
_TYPES: dict[str, pa.DataType] = {
    "step": pa.int32(),
    "prompt": pa.string(),
    "completion": pa.string(),
    "score": pa.float32(),
    "kl": pa.float32(),
    "length": pa.int32(),
    "ended": pa.bool_(),
    "prompt_id": _INTS,
    "token_id": _INTS,
    "token_text": pa.list_(pa.string()),
    "token_written": pa.list_(pa.bool_()),
    **dict.fromkeys(TOKEN_VALUES, _FLOATS),
    # Of episodes of several turns
    "messages": pa.string(),
    "end": pa.string(),
    "turn_reward": _FLOATS,
    "token_turn": _INTS,
}


@dataclass(frozen=True)
class _Noted:
    """A rank's first `n` responses of an update, copied on their device.

    Attributes:
        step: The update's number.
        prompts: Ids, left-padded, long `(n, C)`.
        responses: Ids, right-padded, long `(n, T)`.
        masks: True on real prompt tokens, on real response tokens, and on tokens that the policy wrote; on the CPU.
        per_token: The known `TOKEN_VALUES` by name, float32 `(n, T)`.
        columns: Values of each response, float32 `(n,)`.
        extra: Columns that reward functions logged.
    """

    step: int
    prompts: Tensor
    responses: Tensor
    masks: tuple[Any, Any, Any]
    per_token: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]
    extra: Mapping[str, Sequence[Any]]


class KeptCompletions:
    """Keeps the first responses of the latest update, with the values of each token, until the update is logged.

    Keeping does not wait for the device and draws no random numbers. Only logged updates are decoded.

    Args:
        args: Gives the KL estimator.
        tokenizer: The policy's tokenizer.
        num_processes: Number of ranks, which share the responses.
    """

    def __init__(self, args: PPOConfig, tokenizer: PreTrainedTokenizerBase, num_processes: int) -> None:
        self.tokenizer, self.kl_estimator = tokenizer, args.kl_estimator
        self._num_rows = -(-NUM_KEPT_COMPLETIONS // num_processes)
        self._noted: _Noted | None = None

    def note(
        self,
        step: int,
        rollout: Rollout,
        advantages: Tensor,
        rewards: Tensor,
        columns: Mapping[str, Tensor],
        extra: Mapping[str, Sequence[Any]],
    ) -> None:
        """Keep an update's first responses, and drop the responses of the previous update.

        Args:
            step: The update's number.
            rollout: This rank's `B` responses.
            advantages: Advantages of the policy loss, `(B, T)`.
            rewards: Reward of each token before whitening, `(B, T)`.
            columns: The result of `episode_columns`.
            extra: Columns that reward functions logged, `B` values each.
        """
        rows, context = slice(min(self._num_rows, len(rollout))), rollout.context_length
        of_tokens = {"token_value": rollout.values, "token_advantage": advantages, "token_reward": rewards}
        if (kl := rollout.kl(self.kl_estimator)) is not None:
            of_tokens["token_kl"] = kl
        ids, attention = rollout.query_responses[rows].clone(), rollout.masks.attention[rows].copy()
        self._noted = _Noted(
            step,
            ids[:, :context],
            ids[:, context:],
            (attention[:, :context], attention[:, context:], rollout.masks.response[rows].copy()),
            {name: values[rows].detach().float().clone() for name, values in of_tokens.items()},
            {name: values[rows].detach().clone() for name, values in columns.items()},
            dict(extra),
        )

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Return this rank's rows of an update, or an empty list if it is not the latest.

        Returns:
            A dict of JSON values for each response: `step`, `prompt` (without special tokens), `completion`, `score`
            (after shaping), `rewards/<name>` of each source, `kl` (nats; None without a reference, also for tokens),
            `length` (tokens that the policy wrote), `ended`, `extra/<name>`, `prompt_id`; in lists over its tokens,
            `token_id`, `token_text`, `token_written` (False for tokens of a tool or environment) and `TOKEN_VALUES`.
            Episodes of several turns have `messages` (JSON), `end` (what ended or cut it), `turn_reward` (the
            environment's reward of each turn) and `token_turn` (number of the turn, None between turns).
        """
        noted, self._noted = self._noted, None
        if noted is None or noted.step != step:
            return []
        ids = torch.cat([noted.prompts, noted.responses], dim=1).cpu()  # once: each copy waits for the device
        prompts, responses = (
            part.tolist() for part in ids.split([noted.prompts.shape[1], noted.responses.shape[1]], 1)
        )
        figures = dict(zip(noted.per_token, torch.stack([*noted.per_token.values()]).tolist(), strict=True))
        in_prompt, in_response, written = (mask.tolist() for mask in noted.masks)
        columns = {name: values.tolist() for name, values in noted.columns.items()}
        extra = dict(noted.extra)
        episodes = extra.pop(EPISODE_COLUMN, None)
        rows = []
        for row in range(len(prompts)):
            prompt = list(compress(prompts[row], in_prompt[row]))
            response, own = (list(compress(values[row], in_response[row])) for values in (responses, written))
            of_tokens: dict[str, list[float | None]] = {name: [None] * len(own) for name in TOKEN_VALUES}
            for name, values in figures.items():
                pairs = zip(compress(values[row], in_response[row]), own, strict=True)
                of_tokens[name] = [value if is_own else None for value, is_own in pairs]
            rows.append(
                {
                    "step": step,
                    "prompt": self.tokenizer.decode(prompt, skip_special_tokens=True),
                    "completion": self.tokenizer.decode(response),
                    "score": columns["scores"][row],
                    **{name: values[row] for name, values in columns.items() if name.startswith("rewards/")},
                    "kl": columns["kl"][row] if "kl" in columns else None,
                    "length": sum(own),
                    "ended": bool(columns["ended"][row]),
                    **{f"extra/{name}": values[row] for name, values in extra.items()},
                    "prompt_id": prompt,
                    "token_id": response,
                    "token_text": texts_of_tokens(self.tokenizer, response),
                    "token_written": own,
                    **of_tokens,
                    **({} if episodes is None else _episode(episodes[row], own)),
                }
            )
        return rows


def texts_of_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds.

    Args:
        tokenizer: The tokenizer.
        ids: Token ids of a text.

    Returns:
        A text for each token; a character of several tokens is at its last token, the others are empty. Bytes that
        make no character are one U+FFFD, before the text of the token that follows them.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return [str(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]
    stream, texts = DecodeStream(skip_special_tokens=False), list[str]()
    for token in ids:
        try:
            texts.append(stream.step(tokenizer.backend_tokenizer, token) or "")
        except Exception:  # the library has no narrower type for bytes that make no character
            stream = DecodeStream(skip_special_tokens=False)
            texts.append("\ufffd" + (stream.step(tokenizer.backend_tokenizer, token) or ""))
    return texts


def _episode(episode: Mapping[str, Any], written: Sequence[bool]) -> dict[str, Any]:
    """Return the columns of an episode; a turn is an unbroken run of tokens that the policy wrote."""
    turns = accumulate(own and not before for before, own in pairwise([False, *written]))
    of_tokens = [number - 1 if own else None for number, own in zip(turns, written, strict=True)]
    given = {"end": episode["end"], "turn_reward": [float(reward) for reward in episode["turn_reward"]]}
    return {"messages": as_json(episode["messages"]), **given, "token_turn": of_tokens}


# Files


def write_completions(output_dir: str | Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the responses of an update to `_completions/completions_<step>.parquet`.

    Args:
        output_dir: The run's directory.
        rows: The responses of one update, at least one; columns as in `KeptCompletions.rows`.

    Returns:
        The file.
    """
    path = Path(output_dir, COMPLETIONS_DIR, f"completions_{rows[0]['step']:05d}.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: _array([row.get(name) for row in rows], _TYPES.get(name)) for name in names})
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return path


def find_completions(output_dir: str | Path) -> dict[int, Path]:
    """Return the file of each update.

    Args:
        output_dir: The run's directory.
    """
    paths = Path(output_dir, COMPLETIONS_DIR).glob("completions_*.parquet")
    return dict(sorted((int(path.stem.removeprefix("completions_")), path) for path in paths))


def read_completions(path: str | Path) -> list[dict[str, Any]]:
    """Read the responses of an update.

    Args:
        path: The file.
    """
    return pq.read_table(path).to_pylist()


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    if kind is None:  # reward functions may log any value
        is_number = all(value is None or isinstance(value, int | float) for value in values)
        values = [None if value is None else float(value) if is_number else str(value) for value in values]
        kind = pa.float64() if is_number else pa.string()
    return pa.array(values, kind)
