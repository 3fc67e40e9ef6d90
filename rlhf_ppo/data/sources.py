"""Data sets from files, directories and hub names: splits, held-out rows, preference pairs in all of TRL's formats."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import datasets
from datasets.exceptions import DatasetsError

from rlhf_ppo.data.prompts import PROMPT_COLUMNS, is_conversation
from rlhf_ppo.terminal import visible_logger

logger = visible_logger(__name__)

Rows = datasets.Dataset | datasets.IterableDataset
"""Rows of a data set, or a stream of them."""

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}
"""The kinds of files that hold prompts, and the builder of `datasets` that reads each."""


def load_splits(
    name: str | None, config: str | None = None, streaming: bool = False, argument: str = "dataset_name"
) -> Mapping[Any, Any]:
    """Load a data set from wherever it is.

    Args:
        name: A file (`.jsonl`, `.json`, `.csv`, `.parquet`, `.arrow`, `.txt`), a directory with such files, a
            directory written by `save_to_disk`, or a name on the hub.
        config: Name of the data set's configuration; None for a file and for a directory of `save_to_disk`.
        streaming: Whether to read rows as they are needed.
        argument: The option that gave the name, for error messages.

    Returns:
        Each split by its name; what has no splits is `train`.

    Raises:
        ValueError: There is no such data set, or it cannot be read.
    """
    if not name:
        raise ValueError(f"{argument} is not set: give a file, a directory or a name on the hub")
    path = os.path.expanduser(name)
    try:
        if os.path.isfile(path):
            builder = BUILDERS[os.path.splitext(path)[1]]
            loaded = datasets.load_dataset(builder, data_files={"train": path}, streaming=streaming)
            if builder == "json":
                _warn_of_times(loaded["train"], name)
            return loaded
        if any(os.path.isfile(os.path.join(path, file)) for file in ("dataset_dict.json", "dataset_info.json")):
            saved = datasets.load_from_disk(path)
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            return {key: split.to_iterable_dataset() for key, split in splits.items()} if streaming else splits
        return datasets.load_dataset(path, name=config, streaming=streaming)
    except (OSError, ValueError, LookupError, RuntimeError, StopIteration, DatasetsError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first, _, others = (str(cause).strip() or type(cause).__name__).partition("\n")
        reason = first
        if first.startswith("Config name is missing"):  # the next line has the names
            reason = (
                f"{others.splitlines()[0]}; set dataset_config, or save one with datasets: "
                "load_dataset(NAME, CONFIG).save_to_disk(DIRECTORY)"
            )
        reason = "files of another kind are not read" if isinstance(cause, KeyError) else reason
        reason = "it has no rows" if isinstance(cause, StopIteration) or "no data" in reason else reason
        raise ValueError(
            f"{argument}={name!r} cannot be loaded as a file ({', '.join(BUILDERS)}), directory or hub name: {reason}"
        ) from error


def _warn_of_times(rows: Any, name: str) -> None:
    """Warn of columns whose texts were read as times, as Arrow does with dates in JSON."""
    features = rows.features or {}  # a stream may not know
    if times := [
        column for column, kind in features.items() if str(getattr(kind, "dtype", "")).startswith("timestamp")
    ]:
        logger.warning(
            f"{name}: the texts of {times} were read as times, so no response equals them; to keep the texts, write "
            "the rows with datasets' save_to_disk or to_parquet"
        )


def choose_split(splits: Mapping[Any, Any], split: str, argument: str) -> Any:
    """Take one split.

    Args:
        splits: Each split by its name.
        split: The wanted one.
        argument: The option that named it, for the error message.

    Raises:
        ValueError: There is no such split.
    """
    if split not in splits:
        raise ValueError(f"{argument}={split!r}, but the data set has only these splits: {list(splits)}")
    return splits[split]


def with_prompts_from(dataset: Rows | None, column: str | None) -> Any:
    """Return a data set whose column of prompts is named `prompt` and replaces other prompt columns.

    Args:
        dataset: The rows, or None.
        column: The argument `prompt_column`; None leaves the names as they are.

    Raises:
        ValueError: There is no such column.
    """
    if dataset is None or column is None:
        return dataset
    names = dataset.column_names or [*next(iter(dataset.take(1)), {})]
    if column not in names:
        raise ValueError(f"prompt_column={column!r}, but the data set has the columns {names}: name one of them")
    others = [name for name in PROMPT_COLUMNS if name in names and name != column]
    return dataset.remove_columns(others).rename_columns({column: "prompt"} if column != "prompt" else {})


def hold_out(dataset: Rows, num_rows: int) -> tuple[Any, Any]:
    """Set rows aside for evaluation: the last ones, or the first ones of a stream.

    Args:
        dataset: A `datasets.Dataset` or `IterableDataset`.
        num_rows: Number of rows, but at most a tenth of the data set where its length is known.

    Returns:
        The other rows, and those set aside, or None instead of fewer than one.

    Raises:
        ValueError: A stream has no other rows.
    """
    if isinstance(dataset, datasets.IterableDataset):
        others = dataset.skip(num_rows)
        if next(iter(others.take(1)), None) is None:
            raise ValueError(
                f"the first {num_rows} rows of a stream are held out for evaluation, and none is left: give "
                "dataset_test_split, or leave dataset_streaming out"
            )
        return others, dataset.take(num_rows)
    kept = len(dataset) - min(num_rows, len(dataset) // 10)
    held_out = dataset.select(range(kept, len(dataset))) if kept < len(dataset) else None
    return dataset.select(range(kept)), held_out


def hold_out_pairs(dataset: Rows, num_rows: int = 200, largest_share: float = 0.1) -> tuple[Any, Any]:
    """Set pairs of random prompts aside; the same ones each time, so that a resumed run has not learned from them.

    Args:
        dataset: Pairs; those with the same `prompt` stay together.
        num_rows: Number of pairs.
        largest_share: Largest share of the data set that is set aside.

    Returns:
        The other pairs, and those set aside, or None instead of fewer than one. A stream is returned whole with None:
        its length is unknown, and accuracy needs the number of pairs.
    """
    if isinstance(dataset, datasets.IterableDataset):
        return dataset, None
    wanted = min(num_rows, int(largest_share * len(dataset)))
    has_prompts = "prompt" in dataset.column_names
    prompts = [str(prompt) for prompt in dataset["prompt"]] if has_prompts else range(len(dataset))
    rows: dict[Any, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(prompt, []).append(row)
    groups, chosen = list(rows.values()), set[int]()
    random.Random(0).shuffle(groups)
    for group in groups:
        if len(chosen) + len(group) <= wanted:
            chosen |= {*group}
    if not chosen:
        return dataset, None
    return dataset.select([row for row in range(len(dataset)) if row not in chosen]), dataset.select(sorted(chosen))


def load_named(dataset: Any, argument: str, splits: tuple[str, ...]) -> Any:
    """Return a trainer's data set; load one that is given as a path or a hub name; give pairs explicit prompts.

    Args:
        dataset: A data set, a path, a hub name, or a dict of these.
        argument: Name of the trainer's argument, for error messages.
        splits: The split to take, in order of preference; a data set with a single split needs none of them.

    Raises:
        ValueError: There is no such data set, or none of the splits.
    """
    if isinstance(dataset, dict) and argument == "eval_dataset":
        return {name: load_named(rows, f"{argument}[{name!r}]", splits) for name, rows in dataset.items()}
    if not isinstance(dataset, str | os.PathLike):
        is_pairs = {"chosen", "rejected"} <= {*(getattr(dataset, "column_names", None) or ())}
        return separate_prompts(dataset, where_missing=True) if is_pairs and hasattr(dataset, "take") else dataset
    loaded = load_splits(os.fspath(dataset), argument=argument)
    names = [name for name in splits if name in loaded] or (list(loaded) if len(loaded) == 1 else [])
    if not names:
        raise ValueError(f"{argument}={os.fspath(dataset)!r} has the splits {list(loaded)}; load one and pass it")
    return separate_prompts(choose_split(loaded, names[0], argument), where_missing=True)


HH_TURN, HH_USER = "\n\nAssistant:", "\n\nHuman:"
"""The opening of the assistant's and of the user's turn in the raw texts of Anthropic's hh-rlhf."""


def with_explicit_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    r"""Return a preference pair with its prompt apart from both responses.

    | given | prompt |
    |---|---|
    | `prompt`, and responses that do not repeat it | as it is |
    | no prompt; texts of hh-rlhf, "\n\nHuman: ... \n\nAssistant: ..." | up to the last common "\n\nAssistant:" |
    | no prompt; other texts, or conversations | the common beginning, by TRL's `extract_prompt` |
    | a text as prompt beside whole conversations | the conversations' common beginning |
    | a text as prompt beside answers as messages | the text as the user's message |

    Args:
        row: A row with `chosen` and `rejected`, each a text or a list of messages, and perhaps `prompt`.

    Returns:
        The row with `prompt`, `chosen` and `rejected`; responses to a conversation are lists of messages.

    Raises:
        ValueError: One response is a text and the other a conversation.
    """
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if is_conversation(chosen) != is_conversation(rejected):
        raise ValueError("chosen is a text and rejected a conversation, or the reverse: give both in one format")
    pair = {"chosen": chosen, "rejected": rejected} | ({} if prompt is None else {"prompt": prompt})
    if is_conversation(prompt) and not is_conversation(chosen):
        answers = {key: [{"role": "assistant", "content": pair[key]}] for key in ("chosen", "rejected")}
        return {**row, **answers}
    if prompt is None and isinstance(chosen, str):
        different = (index for index, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1])
        turn = chosen.rfind(HH_TURN, 0, next(different, min(len(chosen), len(rejected))))
        if turn >= 0:
            end = turn + len(HH_TURN)
            return {**row, "prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}
    if isinstance(prompt, str) and is_conversation(chosen) and chosen[0]["role"] == "assistant":
        return {**row, "prompt": [{"role": "user", "content": prompt}]}
    from trl.data_utils import maybe_extract_prompt

    return {**row, **maybe_extract_prompt(pair)}


def separate_prompts(dataset: Any, where_missing: bool = False) -> Any:
    """Return a data set of preference pairs with explicit prompts; other data pass unchanged. The first row decides.

    Args:
        dataset: A data set or a stream.
        where_missing: Whether to leave pairs with a `prompt` as they are.
    """
    first = next(iter(dataset.take(1)), {})
    if not {"chosen", "rejected"} <= first.keys() or ("prompt" in first and where_missing):
        return dataset
    if "prompt" not in first and not first.keys().isdisjoint(PROMPT_COLUMNS):  # the prompt is in another column
        return dataset
    responses = (first["chosen"], first["rejected"])
    if not all(isinstance(response, str) for response in responses) and not all(map(is_conversation, responses)):
        return dataset  # later checks name the column
    if with_explicit_prompt(first) == first:
        return dataset
    return dataset.map(with_explicit_prompt)
