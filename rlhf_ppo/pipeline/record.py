"""`pipeline.json`: what each step was started with and what it wrote, and whether both are still so."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import xxhash

from rlhf_ppo.checkpoints.jsonfile import parsed_json, write_json
from rlhf_ppo.checkpoints.manifest import hash_of_file
from rlhf_ppo.config.redaction import shown
from rlhf_ppo.config.validation import check_type

RECORD = "pipeline.json"
"""The file in the pipeline's directory that lists the steps that were started, and which of them are finished."""

_OF_THE_RUN = {"README.md", "training_args.bin", "trainer_state.json", "log_history.jsonl", "curves.png"}
_DATA = ("dataset_name", "ptx_dataset", "judge_prompt", "config", "reward_funcs", "judge")
_MODELS = ("model_name_or_path", "sft_model_path", "reward_model_path", "model", "opponent", "judge_model")


@dataclass(frozen=True)
class Entry:
    """What a step was started with, and what it wrote.

    Attributes:
        options: Its options, by name.
        files: Hashes of the local data, code and models that the options name.
        inputs: Hashes of what it reads of earlier steps, by the steps' names.
        output: Hashes of the files that it wrote; None until it is finished.
    """

    options: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    output: dict[str, str] | None = None

    def changes(self, now: Entry) -> str:
        """Tell which options and files are others now, empty if none are. A file that is gone counts as unchanged.

        Args:
            now: What the step would be started with now.
        """
        names = sorted(name for name in self.options.keys() | now.options.keys() if _differs(name, self, now))
        options = (f"{name}={self.options.get(name)!r} is {now.options.get(name)!r} now" for name in names)
        return ", ".join([*options, *(f"{path} has other content now" for path in _different(self.files, now.files))])

    def changed_inputs(self, now: Entry) -> list[str]:
        """Name the earlier steps that have written something else since.

        Args:
            now: What the step would be started with now.
        """
        return _different(self.inputs, now.inputs)


def _differs(name: str, before: Entry, now: Entry) -> bool:
    return json.dumps(before.options.get(name)) != json.dumps(now.options.get(name))  # in which NaN equals NaN


def _different(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def read_record(output_dir: Path) -> dict[str, Entry]:
    """Read `pipeline.json`; a directory without one gives an empty record.

    Args:
        output_dir: The pipeline's directory.

    Raises:
        OSError: It cannot be opened.
        ValueError: It holds something else; the message names the file, the key and the fix.
    """
    path = output_dir / RECORD
    if not path.exists():
        return {}
    fix = "restore it, or rename it: then each step is run again, a training step from its newest checkpoint"
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file; {fix}")
    try:
        content = parsed_json(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} is cut off or no JSON; {fix}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {_shown(content)}, not an object; {fix}")
    return {name: _entry(path, name, value) for name, value in content.items()}


def _entry(path: Path, name: str, value: Any) -> Entry:
    place, fix = f"{path}: the entry {name!r:.60}", "restore the file, or take the entry out to run that step again"
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {_shown(value)}, not an object; {fix}")
    types = get_type_hints(Entry)
    if missing := sorted(types.keys() - value.keys()):
        raise ValueError(f"{place} lacks {missing[0]!r}; {fix}")
    for key, annotation in types.items():
        try:
            check_type(key, value[key], annotation, "")
        except TypeError:
            raise ValueError(f"{place} has {key}={_shown(value[key])}; {fix}") from None
    return Entry(**{key: value[key] for key in types})


def _shown(value: Any) -> str:
    return f"{json.dumps(value):.60}"


def write_record(output_dir: Path, record: Mapping[str, Entry]) -> None:
    """Write `pipeline.json`.

    Args:
        output_dir: The pipeline's directory.
        record: The steps that were started, by name.
    """
    write_json(output_dir / RECORD, {name: asdict(entry) for name, entry in record.items()})


def hashes_of(paths: Iterable[Path]) -> dict[str, str]:
    """Return the hash of each file, by its path."""
    found = sorted(paths)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(map(str, found), pool.map(hash_of_file, found), strict=True))


def model_files(directory: Path) -> Iterator[Path]:
    """Yield the files of a model and its tokenizer; not those that tell of the run, to which the judge adds.

    Args:
        directory: A training step's.
    """
    for path in directory.glob("*"):
        is_of_run = path.name in _OF_THE_RUN or path.name.startswith(("ppo_", "_", ".")) or "_results" in path.name
        if path.is_file() and not is_of_run:
            yield path


def hash_of_all(hashes: Mapping[str, str]) -> str:
    """Return one hash of the hashes of several files."""
    return xxhash.xxh3_128(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def what_is_missing(output: Mapping[str, str]) -> str | None:
    """Tell which file of a step's output is gone or was changed, or None.

    Args:
        output: The files' hashes by their paths, as `hashes_of` found them.
    """
    paths = [Path(path) for path in output]
    if gone := [path for path in paths if not _is_file(path)]:
        return f"{gone[0]} is gone"
    now = hashes_of(paths)
    changed = [path for path in output if now[str(Path(path))] != output[path]]
    return f"{changed[0]} was changed" if changed else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except ValueError:  # a name that no file can have
        return False


def named_files(options: Mapping[str, Any], made: Sequence[Path]) -> dict[str, str]:
    """Return hashes of the local data, code and models that options name, by their paths.

    Args:
        options: A step's.
        made: Directories of steps, which are left out.
    """
    found = {}
    for name, value in options.items():
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, str) and name in (*_DATA, *_MODELS) and Path(word) not in made:
                files = list(_files_of(word, is_model=name in _MODELS))
                if files:
                    found[shown(word)] = hash_of_all(hashes_of(files))
    return found


def _files_of(word: str, is_model: bool) -> Iterator[Path]:
    path = Path(word).expanduser()
    if path.is_dir():
        yield from model_files(path) if is_model else (each for each in path.rglob("*") if each.is_file())
    elif not is_model:
        yield from (each for each in (path, Path(word.rpartition(":")[0]).expanduser()) if each.is_file())
