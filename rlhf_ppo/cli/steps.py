"""The steps of a pipeline: its file, and the record of started and finished steps (`pipeline.json`)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import xxhash
import yaml

from rlhf_ppo.checkpoints.files import hash_of_file, parse_json, write_json
from rlhf_ppo.config.validation import PlainWords, check_type
from rlhf_ppo.reporting.judgements import ACCURACY, JUDGED, win_rate_beside
from rlhf_ppo.terminal import redacted

STEPS = ("sft", "reward", "judge_reward", "ppo", "judge", "report")
"""Sections of a pipeline's file that are steps, in order."""

COMMANDS = {"ppo": "train", "judge_reward": "reward"}
"""Commands of steps whose command has another name."""

REWARD_MODELS = ("reward", "judge_reward")
TRAINING = ("sft", *REWARD_MODELS, "ppo")
OTHERS = ("output_dir", "seeds", "launch", "common")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: Its name, such as `sft`, or `ppo-seed2` with several seeds.
        kind: One of `STEPS`.
        output_dir: Its output directory.
        options: Its options, by name.
        runs: Directories of the runs that a report is about.
    """

    name: str
    kind: str
    output_dir: Path
    options: Mapping[str, Any]
    runs: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The subcommand of `rlhf-ppo`."""
        return COMMANDS.get(self.kind, self.kind)

    def argv(self) -> list[str]:
        """Return the arguments of the subcommand."""
        return [*self.runs, *(word for name, value in self.options.items() for word in _words(name, value))]

    def recorded_options(self) -> dict[str, Any]:
        """Return the options as JSON values, without secrets."""
        return json.loads(json.dumps(redacted({**self.options, "runs": list(self.runs)}), default=str))

    def written(self) -> Iterator[Path]:
        """Yield the existing files of the step's result."""
        if self.kind in TRAINING:
            yield from model_files(self.output_dir)
        elif self.kind == "judge":
            table = self.output_dir / f"{JUDGED}.parquet"
            yield from (path for path in (table, win_rate_beside(table)) if path.exists())
        elif (page := Path(os.path.expanduser(self.options["output"]))).exists():
            yield page


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's file.

    Attributes:
        output_dir: The directory of all steps' directories.
        steps: The steps, in order.
        launch: Module and arguments that launch training steps; empty to start them directly.
    """

    output_dir: Path
    steps: tuple[Step, ...]
    launch: tuple[str, ...] = ()

    def inputs_of(self, step: Step) -> list[str]:
        """Name the earlier steps whose output a step reads.

        Args:
            step: One of the steps.
        """
        earlier = self.steps[: self.steps.index(step)]
        if step.kind == "report":
            return [other.name for other in earlier if other.kind in ("ppo", "judge")]
        values = [value for name, value in step.options.items() if name != "output_dir"]
        named = {Path(word) for value in values for word in _listed(value) if isinstance(word, str)}
        return [other.name for other in earlier if other.output_dir in named]

    def files_of(self, step: Step) -> dict[str, str]:
        """Return hashes of the data, code and models that a step reads, without the output of other steps.

        Args:
            step: One of the steps.
        """
        return named_files(step.options, [other.output_dir for other in self.steps])


def read_pipeline(path: str | Path) -> Pipeline:
    """Read a pipeline's file.

    A seed keeps the name of the step in which it was started; `pipeline.json` lists it.

    A later step uses the models of earlier steps unless its section names others: the reward models and the policy
    start from the model of `sft`; the model of `reward` scores PPO's responses; the judge compares the policy with the
    model of `sft`, by the model of `judge_reward`, and writes into the policy's directory, where model card and report
    find the result.

    Args:
        path: A YAML file with sections of the names `STEPS`, and `output_dir`, `seeds`, `launch` and `common`.

    Raises:
        OSError: The file does not exist.
        ValueError: A section is wrong; the message names it and what to write. Or `pipeline.json` is damaged.
    """
    try:
        content = yaml.load(Path(os.path.expanduser(path)).read_text(encoding="utf-8"), PlainWords)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold sections such as `ppo:`, each with options")
    if unknown := sorted(str(name) for name in content if name not in (*STEPS, *OTHERS)):
        raise ValueError(f"{path} has the sections {unknown}; there are {[*OTHERS, *STEPS]}")
    sections = {name: _options(content, name) for name in ("common", *STEPS)}
    output_dir = content.get("output_dir")
    if not isinstance(output_dir, str) or not output_dir:
        raise ValueError(f"output_dir={output_dir!r}: name the directory that all steps write into")
    wanted = [name for name in STEPS if name in content]
    if not wanted:
        raise ValueError(f"{path} has no step; write at least one of {list(STEPS)}")
    folder = Path(os.path.expanduser(output_dir))
    policies = _policies(_seeds(content.get("seeds")), read_record(folder))
    steps = tuple(_steps(folder, wanted, sections, policies))
    return Pipeline(folder, steps, _launch(content.get("launch")))


def _steps(
    folder: Path, wanted: Sequence[str], sections: Mapping[str, dict[str, Any]], policies: Mapping[int, str]
) -> Iterator[Step]:
    common = sections["common"]
    made = {name: str(folder / name) for name in ("sft", *REWARD_MODELS) if name in wanted}
    for name in made:
        start = {"model_name_or_path": made["sft"]} if name in REWARD_MODELS and "sft" in made else {}
        yield _step(name, name, folder / name, start | common | sections[name])
    if "ppo" in wanted:
        start = {"sft_model_path": made.get("sft"), "reward_model_path": made.get("reward")}
        given = _known(start) | common | sections["ppo"]
        _check_ppo(given)
        for seed, name in policies.items():
            yield _step(name, "ppo", folder / name, given | {"seed": seed})
    if "judge" in wanted:
        for seed, policy in policies.items():
            start = {
                "model": str(folder / policy) if "ppo" in wanted else None,
                "opponent": made.get("sft"),
                "seed": seed,
            }
            if "judge" not in sections["judge"]:
                start["judge_model"] = made.get("judge_reward")
            options = _overridden(_known(start), sections["judge"])
            yield _step(policy.replace("ppo", "judge"), "judge", folder / policy / JUDGED, options)
    if "report" in wanted:
        if "ppo" not in wanted:
            raise ValueError(
                "report is about PPO's runs, but the section `ppo` is missing: add it, or leave report out"
            )
        runs = tuple(str(folder / name) for name in policies.values())
        options = {"output": str(folder / "report.html"), **sections["report"]}
        yield Step("report", "report", folder, options, runs)


def _policies(seeds: Sequence[int], record: Mapping[str, Entry]) -> dict[int, str]:
    """Name the step of each seed; a started seed keeps its name, and thus its result, if other seeds come or go."""
    ppo = [(name, entry) for name, entry in record.items() if name == "ppo" or name.startswith("ppo-seed")]
    finished_last = sorted(ppo, key=lambda named: named[1].output is not None)
    started = {json.dumps(entry.options.get("seed")): name for name, entry in finished_last}
    alone = len(seeds) == 1 and "ppo" not in record
    return {seed: started.get(str(seed), "ppo" if alone else f"ppo-seed{seed}") for seed in seeds}


def _check_ppo(options: Mapping[str, Any]) -> None:
    """Raise if no model or reward is named: the defaults, those of TRL's script, are models of the hub."""
    if "config" in options:
        return  # the file may name them
    if options.get("sft_model_path") is None:
        raise ValueError("ppo has no language model to start from: write a section `sft`, or sft_model_path")
    if not any(options.get(name) for name in ("reward_model_path", "reward_funcs", "environment")):
        raise ValueError(
            "ppo has no reward: write a section `reward`, or reward_model_path, reward_funcs or environment"
        )


def _overridden(start: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the judge's options; a given column replaces the model of an earlier step."""
    taken = {name for name in start if f"{name}_column" in given}
    return {name: value for name, value in start.items() if name not in taken} | dict(given)


def _step(name: str, kind: str, place: Path, options: Mapping[str, Any]) -> Step:
    return Step(name, kind, place, {**options, "output_dir": str(place)})


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _options(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    options = content.get(name) or {}
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise ValueError(f"{name}={options!r:.80} must be options, one a line: `learning_rate: 1.0e-5`")
    if "output_dir" in options:
        raise ValueError(f"{name} has an output_dir of its own; it is <output_dir>/{name}")
    if name == "ppo" and "seed" in options:
        raise ValueError(f"ppo has seed={options['seed']!r}; write `seeds: [{options['seed']}]` on top")
    return options


def _seeds(given: Any) -> list[int]:
    seeds = [0] if given is None else _listed(given)
    if not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds) or len({*seeds}) < len(seeds):
        raise ValueError(f"seeds={given!r} must be different numbers from 0 on, such as [0, 1, 2]")
    return seeds


def _launch(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, str) or not Path(os.path.expanduser(given)).is_file():
        raise ValueError(
            f"launch={given!r} must be a file for `accelerate launch --config_file`, such as those that `rlhf-ppo "
            "configs .` writes"
        )
    return ("accelerate.commands.launch", "--config_file", os.path.expanduser(given))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _words(name: str, value: Any) -> list[str]:
    return [] if value is None else [f"--{name}", *map(_word, _listed(value))]


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)


# ---- Record ----

RECORD = "pipeline.json"
"""File in the pipeline's directory that lists the started steps, and which of them are finished."""

_OF_THE_RUN = {"README.md", "training_args.bin", ACCURACY, "trainer_state.json", "log_history.jsonl", "curves.png"}
_DATA = ("dataset_name", "ptx_dataset", "judge_prompt", "config", "reward_funcs", "environment", "tools", "judge")
_CODE = re.compile(r"(?:[^=/]+=)?(?P<file>.+\.py):")
_MODELS = (
    "model_name_or_path", "sft_model_path", "reward_model_path", "value_model_path",
    "model", "opponent", "judge_model",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Options, inputs and output of a started step.

    Attributes:
        options: Its options, by name.
        files: Hashes of the local data, code and models that the options name.
        inputs: Hash of the output of each earlier step that it reads, by the step's name.
        output: Hashes of its output; None until it is finished.
    """

    options: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    output: dict[str, str] | None = None

    def changes(self, now: Entry) -> str:
        """Describe the changed options and files; empty if there are none. A missing file counts as unchanged.

        Args:
            now: The entry with which the step would start now.
        """
        names = sorted(name for name in self.options.keys() | now.options.keys() if _differs(name, self, now))
        options = (f"{name}={self.options.get(name)!r} is {now.options.get(name)!r} now" for name in names)
        return ", ".join([*options, *(f"{path} has other content now" for path in _different(self.files, now.files))])

    def changed_inputs(self, now: Entry) -> list[str]:
        """Name the earlier steps whose output has changed.

        Args:
            now: The entry with which the step would start now.
        """
        return _different(self.inputs, now.inputs)


def _differs(name: str, before: Entry, now: Entry) -> bool:
    return json.dumps(before.options.get(name)) != json.dumps(now.options.get(name))  # here NaN equals NaN


def _different(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def read_record(output_dir: Path) -> dict[str, Entry]:
    """Read `pipeline.json`; a directory without one gives an empty record.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is damaged; the message names the file, the key and the fix.
    """
    path = output_dir / RECORD
    if not path.exists():
        return {}
    fix = "restore it, or rename it: then each step is run again, a training step from its newest checkpoint"
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file; {fix}")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
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
        record: The started steps, by name.
    """
    write_json(output_dir / RECORD, {name: asdict(entry) for name, entry in record.items()})


def hashes_of(paths: Iterable[Path]) -> dict[str, str]:
    """Return the hash of each file, by its path."""
    found = sorted(paths)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(map(str, found), pool.map(hash_of_file, found), strict=True))


def model_files(directory: Path) -> Iterator[Path]:
    """Yield the files of a model and its tokenizer, without those about the run, which the judge extends.

    Args:
        directory: The directory of a training step.
    """
    for path in directory.glob("*"):
        is_of_run = path.name in _OF_THE_RUN or path.name.startswith(("ppo_", "_", ".")) or "_results" in path.name
        if path.is_file() and not is_of_run:
            yield path


def hash_of_all(hashes: Mapping[str, str]) -> str:
    """Return one hash of the hashes of several files."""
    return xxhash.xxh3_128(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def why_incomplete(output: Mapping[str, str]) -> str | None:
    """Return a text that names a missing or changed file of a step's output, or None.

    Args:
        output: The result of `hashes_of`.
    """
    paths = [Path(path) for path in output]
    if gone := [path for path in paths if not path.is_file()]:
        return f"{gone[0]} is gone"
    now = hashes_of(paths)
    changed = [path for path in output if now[str(Path(path))] != output[path]]
    return f"{changed[0]} was changed" if changed else None


def named_files(options: Mapping[str, Any], made: Sequence[Path]) -> dict[str, str]:
    """Return hashes of the local data, code and models that options name, by their paths.

    Args:
        options: The options of a step.
        made: Directories of steps, which are left out.
    """
    found = {}
    for name in (*_DATA, *_MODELS):
        for word in _listed(options.get(name)):
            if isinstance(word, str) and Path(word) not in made:
                if files := list(_files_of(word, is_model=name in _MODELS)):
                    found[redacted(word)] = hash_of_all(hashes_of(files))
    return found


def _files_of(word: str, is_model: bool) -> Iterator[Path]:
    path = Path(os.path.expanduser(word))
    if path.is_dir():
        yield from model_files(path) if is_model else (each for each in path.rglob("*") if each.is_file())
    elif not is_model:
        code = [Path(os.path.expanduser(found["file"]))] if (found := _CODE.match(word)) else []
        yield from (each for each in (path, *code) if each.is_file())
