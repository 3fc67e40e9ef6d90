"""Responses of logged updates, token by token, written to `_completions/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_ppo.data.conversation import EPISODE_COLUMN, as_json
from rlhf_ppo.data.files import optional, reading, replacing
from rlhf_ppo.data.images import thumbnails
from rlhf_ppo.data.prompts import written_texts
from rlhf_ppo.data.rollout import Experience, Rollout

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
    "images": pa.list_(pa.string()),
}


@dataclass(frozen=True)
class RecordedUpdate:
    """An update whose responses may be kept.

    Attributes:
        step: Its number.
        rollout: This rank's `B` responses.
        experience: The same with rewards and advantages.
        columns: The result of `rollout_columns`.
        logged: Columns that reward functions logged, `B` values each.
    """

    step: int
    rollout: Rollout
    experience: Experience
    columns: Mapping[str, Tensor]
    logged: Mapping[str, Sequence[Any]]


def completion_rows(
    update: RecordedUpdate, tokenizer: PreTrainedTokenizerBase, kl_estimator: str, num_rows: int
) -> list[dict[str, Any]]:
    """Return the first `num_rows` responses of an update, with the values of each token.

    Args:
        update: The update.
        tokenizer: The policy's tokenizer.
        kl_estimator: The option.
        num_rows: Number of responses.

    Returns:
        A dict of JSON values for each response: `step`, `prompt` (without special tokens), `completion`, `score`
        (after shaping), `rewards/<name>` of each source, `kl` (nats; None without a reference, also for tokens),
        `length` (tokens that the policy wrote), `ended`, `extra/<name>`, `prompt_id`; in lists over its tokens,
        `token_id`, `token_text`, `token_written` (False for tokens of a tool or environment) and `TOKEN_VALUES`.
        Episodes of several turns have `messages` (JSON), `end` (what ended or cut it), `turn_reward` (the
        environment's reward of each turn) and `token_turn` (number of the turn, None between turns). A run with
        images has `images`: thumbnails as `data:` URLs.
    """
    rollout, responses = update.rollout, update.rollout.responses
    kept, context = slice(min(num_rows, len(rollout))), responses.context_length
    ids, masks = responses.query_responses[kept].tolist(), responses.masks
    attention, response_mask = masks.attention[kept].tolist(), masks.response[kept].tolist()
    figures = _token_figures(rollout, update.experience, kl_estimator, kept)
    columns = {name: values[kept].tolist() for name, values in update.columns.items()}
    logged = dict(update.logged)
    episodes = logged.pop(EPISODE_COLUMN, None)
    rows = []
    for row, row_ids in enumerate(ids):
        in_prompt, in_response = attention[row][:context], attention[row][context:]
        prompt, response = list(compress(row_ids, in_prompt)), list(compress(row_ids[context:], in_response))
        written = list(compress(response_mask[row], in_response))
        of_tokens = {name: list(compress(values[row], in_response)) for name, values in figures.items()}
        rows.append(
            {
                "step": update.step,
                "prompt": written_texts(tokenizer, [prompt], skip_special_tokens=True)[0],
                "completion": written_texts(tokenizer, [response])[0],
                "score": columns["scores"][row],
                **{name: values[row] for name, values in columns.items() if name.startswith("rewards/")},
                "kl": columns["kl"][row] if "kl" in columns else None,
                "length": sum(written),
                "ended": bool(columns["ended"][row]),
                **{f"extra/{name}": values[row] for name, values in logged.items()},
                "prompt_id": prompt,
                "token_id": response,
                "token_text": texts_of_tokens(tokenizer, response),
                "token_written": written,
                **of_tokens,
                **({} if episodes is None else _episode(episodes[row], written)),
                **({} if responses.images is None else {"images": thumbnails(responses.images[row])}),
            }
        )
    return rows


def _token_figures(
    rollout: Rollout, experience: Experience, kl_estimator: str, rows: slice
) -> dict[str, list[list[float | None]]]:
    """Return the `TOKEN_VALUES` of some rows, a list of `T` for each row, with one copy to the host.

    They are None where the policy did not write the token, and where they are not known.
    """
    tensors = (rollout.values, experience.advantages, rollout.kl(kl_estimator), experience.rewards)
    known = {name: values for name, values in zip(TOKEN_VALUES, tensors, strict=True) if values is not None}
    numbers = torch.stack([values[rows].detach().float() for values in known.values()]).cpu().numpy().astype(object)
    written = rollout.responses.masks.response[rows]
    numbers[:, ~written] = None
    figures, unknown = dict(zip(known, numbers.tolist(), strict=True)), np.full(written.shape, None).tolist()
    return {name: figures.get(name, unknown) for name in TOKEN_VALUES}


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
        except Exception:  # the library raises nothing more specific for bytes that make no character
            stream = DecodeStream(skip_special_tokens=False)
            texts.append("\ufffd" + (stream.step(tokenizer.backend_tokenizer, token) or ""))
    return texts


def _episode(episode: Mapping[str, Any], written: Sequence[bool]) -> dict[str, Any]:
    """Return the columns of an episode; a turn is an unbroken run of tokens that the policy wrote."""
    turns = accumulate(is_written and not before for before, is_written in pairwise([False, *written]))
    return {
        "messages": as_json(episode["messages"]),
        "end": episode["end"],
        "turn_reward": [float(reward) for reward in episode["turn_reward"]],
        "token_turn": [turn - 1 if is_written else None for turn, is_written in zip(turns, written, strict=True)],
    }


# Files


@optional("The responses of an update")
def write_completions(output_dir: str | Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the responses of an update to `_completions/completions_<step>.parquet`.

    Args:
        output_dir: The run's directory.
        rows: The responses of one update, at least one; columns as in `completion_rows`.

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

    Raises:
        ValueError: The file is damaged.
    """
    with reading(path):
        return pq.read_table(path).to_pylist()


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    if kind is None:  # reward functions may log any value
        is_number = all(value is None or isinstance(value, int | float) for value in values)
        values = [None if value is None else float(value) if is_number else str(value) for value in values]
        kind = pa.float64() if is_number else pa.string()
    return pa.array(values, kind)
