"""Responses of logged updates, token by token: kept until the log, and written to `completions/`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, count, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_ppo.checkpoints.files import replacing
from rlhf_ppo.checkpoints.run import Run
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.conversation import EPISODE_COLUMN, as_json
from rlhf_ppo.data.rollout import Rollout

COMPLETIONS_DIR = "_completions"
"""The directory of the responses in `output_dir`; `push_to_hub` does not upload it."""
NUM_KEPT_COMPLETIONS = 32
"""Number of responses of each logged update that are kept."""

TOKEN_VALUES = ("token_value", "token_advantage", "token_kl", "token_reward")
"""Values of each token that the policy wrote; null for others."""

EPISODE_COLUMNS = {
    "messages": pa.string(),
    "end": pa.string(),
    "turn_reward": pa.list_(pa.float32()),
    "token_turn": pa.list_(pa.int32()),
}
"""Columns of episodes of several turns, which other responses lack."""

_TYPES: dict[str, pa.DataType] = {
    "step": pa.int32(),
    "prompt": pa.string(),
    "completion": pa.string(),
    "score": pa.float32(),
    "kl": pa.float32(),
    "length": pa.int32(),
    "ended": pa.bool_(),
    "prompt_id": pa.list_(pa.int32()),
    "token_id": pa.list_(pa.int32()),
    "token_text": pa.list_(pa.string()),
    "token_written": pa.list_(pa.bool_()),
    **dict.fromkeys(TOKEN_VALUES, pa.list_(pa.float32())),
}
_NAME = re.compile(r"completions_(\d{5,})(?:-(\d+))?\.parquet")
_RUN = b"rlhf_ppo_run"


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
        """Keep an update's first responses, and drop the responses of the previous update.

        Args:
            step: The update's number.
            rollout: This rank's `B` responses.
            advantages: Advantages of the policy loss, `(B, T)`.
            rewards: Reward of each token before whitening, `(B, T)`.
            columns: The result of `episode_columns`.
            extra: Columns that reward functions logged, `B` values each.
        """
        number = min(self._num_rows, len(rollout))
        of_tokens = {"token_value": rollout.values, "token_advantage": advantages, "token_reward": rewards}
        if (kl := rollout.kl(self.kl_estimator)) is not None:
            of_tokens["token_kl"] = kl
        per_token = {name: values[:number].detach().float().clone() for name, values in of_tokens.items()}
        of_rows = {name: values[:number].detach().clone() for name, values in columns.items()}
        context, attention = rollout.context_length, rollout.masks.attention[:number]
        masks = attention[:, :context].copy(), attention[:, context:].copy(), rollout.masks.response[:number].copy()
        ids = rollout.query_responses[:number].clone()
        self._noted = _Noted(step, ids[:, :context], ids[:, context:], masks, per_token, of_rows, dict(extra))
        self._rows = []

    def take(self, rows: list[dict[str, Any]]) -> None:
        """Restore the rows of an update that an earlier run began."""
        self._noted, self._rows = None, rows

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Return this rank's rows of an update, or an empty list if it is not the latest.

        Returns:
            A dict of JSON values for each response: `step`, `prompt` (without special tokens), `completion`, `score`
            (after shaping), `rewards/<name>` of each source, `kl` (nats; None without a reference, also for tokens),
            `length` (tokens that the policy wrote), `ended`, `extra/<name>`, `prompt_id`; in lists over its tokens,
            `token_id`, `token_text`, `token_written` (False for tokens of a tool or environment), `TOKEN_VALUES`.
            Episodes of several turns have `messages` (JSON), `end` (what ended or cut it), `turn_reward` (the
            environment's reward of each turn) and `token_turn` (number of the turn, None between turns).
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
        extra = dict(noted.extra)
        episodes = extra.pop(EPISODE_COLUMN, None)
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
                    "ended": bool(columns["ended"][row]),
                    **{f"extra/{name}": _plain(values[row]) for name, values in extra.items()},
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
    """Return the `EPISODE_COLUMNS`; a turn is an unbroken run of tokens that the policy wrote."""
    turns = accumulate(own and not before for before, own in pairwise([False, *written]))
    of_tokens = [number - 1 if own else None for number, own in zip(turns, written, strict=True)]
    given = {"end": episode["end"], "turn_reward": [float(reward) for reward in episode["turn_reward"]]}
    return {"messages": as_json(episode["messages"]), **given, "token_turn": of_tokens}


def _of_policy(values: Iterable[float], written: list[bool]) -> list[float | None]:
    return [value if own else None for value, own in zip(values, written, strict=True)]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)


# Files


def write_completions(output_dir: str | Path, rows: Sequence[Mapping[str, Any]], run: Run) -> Path:
    """Write the responses of an update to `completions/completions_<step>.parquet`; files are never replaced.

    If a resumed run repeats an update with the same responses, nothing is written. Other responses (of another run, or
    after arguments were changed) go to `completions_<step>-2.parquet` and so on.

    Args:
        output_dir: The run's directory.
        rows: The responses of one update, at least one; columns as in `KeptCompletions.rows`.
        run: The run; its id is stored in the file.

    Returns:
        The file with the responses.

    Raises:
        OSError: The file cannot be written; no partial file is left.
    """
    folder, step = Path(output_dir, COMPLETIONS_DIR), rows[0]["step"]
    folder.mkdir(parents=True, exist_ok=True)
    table = _table(rows).replace_schema_metadata({_RUN: run.id.encode()})
    path = next(path for path in _names(folder, step) if not path.exists() or _holds(path, table, run, step))
    if path.exists():
        return path
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return path


def find_completions(output_dir: str | Path) -> dict[int, Path]:
    """Return the file of each update of the directory's current run; files of earlier runs are left out.

    Args:
        output_dir: The run's directory.

    Raises:
        ValueError: A file is damaged.
    """
    run = Run.load(output_dir)
    found: dict[int, tuple[int, Path]] = {}
    for path in Path(output_dir, COMPLETIONS_DIR).glob("*.parquet"):
        if (match := _NAME.fullmatch(path.name)) is None or not _is_of(path, run, int(match[1])):
            continue
        place = int(match[2] or 1), path
        found[int(match[1])] = max(place, found.get(int(match[1]), place))
    return {step: found[step][1] for step in sorted(found)}


def read_completions(path: str | Path) -> list[dict[str, Any]]:
    """Read the responses of an update.

    Args:
        path: The file.

    Raises:
        ValueError: The file is damaged, or lacks a column.
    """
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if missing := [name for name in _TYPES if name not in table.column_names]:
        raise ValueError(f"{path} has no column {missing[0]!r}: it was not written by rlhf_ppo")
    return table.to_pylist()


def _names(folder: Path, step: int) -> Iterator[Path]:
    yield folder / f"completions_{step:05d}.parquet"
    yield from (folder / f"completions_{step:05d}-{number}.parquet" for number in count(2))


def _holds(path: Path, table: pa.Table, run: Run, step: int) -> bool:
    try:
        return _is_of(path, run, step) and pq.read_table(path).equals(table)
    except (ValueError, pa.ArrowException, OSError):
        return False


def _is_of(path: Path, run: Run, step: int) -> bool:
    """Return whether a file is from a run, or from a run that it continues."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    writer = metadata.get(_RUN)
    return writer is not None and (not run.id or run.owns(Run(writer.decode()), step))


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [_stored(row.get(name)) for row in rows] for name in names}
    types = _TYPES | EPISODE_COLUMNS
    return pa.table({name: _array(values, types.get(name)) for name, values in columns.items()})


def _stored(value: Any) -> Any:
    """Return a value with None for NaN, because NaN is not equal to itself."""
    if isinstance(value, list):
        return [_stored(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    if kind is None:  # reward functions may log any value
        as_kind, kind = (float, pa.float64()) if all(map(_fits_float, values)) else (str, pa.string())
        values = [None if value is None else as_kind(value) for value in values]
    return pa.array(values, kind)


def _fits_float(value: Any) -> bool:
    """Return whether a value is None or a number that float64 holds exactly."""
    return value is None or (isinstance(value, int | float) and float(value) == value)
