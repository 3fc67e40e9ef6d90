"""A process that imports the libraries once and bears a child for every mutant, which imports our code only."""

from __future__ import annotations

import ast
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rlhf_ppo"
OURS = ("rlhf_ppo", "tests")
LATE = {("numpy.testing", ""), ("torch.distributed.tensor", "")}
"""What libraries import when first asked for something, here `torch.testing.assert_close`."""

SECONDS = 240
"""The longest that a child may take, and the libraries' imports."""


@dataclass(frozen=True)
class Mutant:
    """One place of one file, and what stands there instead; the file itself stays as it is.

    Attributes:
        file: Path inside the package.
        original: What is there exactly once.
        mutant: What is run in its place.
    """

    file: str
    original: str
    mutant: str

    def source(self) -> str:
        """Return the text of the broken file."""
        text = (PACKAGE / self.file).read_text()
        found = text.count(self.original)
        assert found == 1, f"{self.file}: {self.original!r} is there {found} times: bring the mutation up to date"
        return text.replace(self.original, self.mutant)


@dataclass(eq=False)
class Outcome:
    """What pytest did in a child, and a pytest plugin that notes it.

    Attributes:
        passed: Number of tests that passed.
        failed: Tests whose own code failed, and how; of those a mutant is killed.
        errors: Whatever else went wrong: files that cannot be imported, fixtures, pytest itself.
        seconds: The child's time on the processor.
    """

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}: {report.longrepr}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            (self.failed if report.when == "call" else self.errors).append(f"{report.nodeid}: {report.longrepr}")
        elif report.when == "call" and report.passed:
            self.passed += 1


class Nursery:
    """The process; it is spawned, so that it holds nothing of the package, whatever the process of the tests holds.

    Attributes:
        killers: The tests that have failed in any child.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.killers: set[str] = set()
        self._process = context.Process(target=_bear, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the connection

    def run(self, folder: Path, tests: Sequence[str], mutant: Mutant | None = None) -> Outcome:
        """Run tests, in this order, up to the first failure.

        Args:
            folder: An empty folder; the child works in it.
            tests: Files below the root, or tests in them, as pytest names them.
            mutant: What is broken in the package; nothing if None.
        """
        broken = None if mutant is None else (str(PACKAGE / mutant.file), mutant.source())
        try:
            self._connection.send((str(folder), list(tests), broken))
            if not self._connection.poll(2 * SECONDS):
                self._process.kill()
                pytest.fail(f"the nursery has not answered for {2 * SECONDS} s")
            code = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(10)
            pytest.fail(f"the nursery is dead, with exit code {self._process.exitcode} ({error!r})")
        assert code == 0, f"the tests did not end: exit code {code} (-{int(signal.SIGALRM)}: not within {SECONDS} s)"
        outcome = Outcome(**json.loads((folder / "outcome.json").read_text()))
        self.killers.update(failed.partition(": ")[0] for failed in outcome.failed)
        return outcome

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(10)
        self._process.kill()


def assert_passed(outcome: Outcome) -> None:
    """Check that tests ran and nothing failed."""
    assert outcome.passed > 0 and (outcome.failed, outcome.errors) == ([], [])


def assert_killed(outcome: Outcome) -> None:
    """Check that a test failed, and nothing else."""
    assert outcome.errors == []
    assert outcome.failed, f"the mutant survived {outcome.passed} tests"
    print("killed by", outcome.failed[0])


def _bear(connection: Connection) -> None:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "REQUIRE_SHARED_DATA": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    from hypothesis import Phase, settings

    # The first example that fails kills: no time goes into finding the smallest one.
    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None, derandomize=True)
    settings.load_profile("mutants")
    _import_libraries([*PACKAGE.rglob("*.py"), *(ROOT / "tests").glob("*.py")])
    while True:
        try:
            folder, tests, broken = connection.recv()
        except EOFError:
            return
        _import_libraries([ROOT / test.partition("::")[0] for test in tests])
        if (child := os.fork()) == 0:
            _test(Path(folder), tests, broken)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _import_libraries(files: Sequence[Path]) -> None:
    """Import what files import, but nothing of ours."""
    new = [file for file in files if file not in _read]
    _read.update(new)
    for module, name in {*LATE, *(each for file in new for each in _imports(file))} - _imported:
        _imported.add((module, name))
        if module.partition(".")[0] not in OURS:
            with suppress(ImportError):  # the child will say so
                getattr(importlib.import_module(module), name, None)  # transformers imports some names when asked
    if new and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
        assert not _of_ours()
        gc.collect()
        gc.freeze()


_read: set[Path] = set()
_imported: set[tuple[str, str]] = set()


def _imports(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)


def _test(folder: Path, tests: Sequence[str], broken: tuple[str, str] | None) -> None:
    """Run pytest and leave the process, in every case."""
    code = 1
    try:
        signal.alarm(SECONDS)  # ends the process
        sys.dont_write_bytecode = True
        os.chdir(folder)
        sys.path.insert(0, str(ROOT))
        for name in [name for name, _ in _of_ours()] + ["tests", "tests.mutation"]:
            sys.modules.pop(name, None)
        loaded = _break(*broken) if broken is not None else ["nothing is broken"]
        Path("pytest.ini").write_text("[pytest]\n")
        outcome = Outcome()
        options = f"-c pytest.ini --rootdir {ROOT} -x -p no:terminal -p no:cacheprovider"
        more = "--import-mode=importlib --assert=plain"
        if all(test.startswith("tests/algorithm/") for test in tests):  # of torch alone
            more += " --noconftest"
        paths = [str(ROOT / test) for test in tests]
        ended = pytest.main([*options.split(), *more.split(), *paths], plugins=[outcome])
        if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            outcome.errors.append(f"pytest: {ended!r}")
        if not loaded:
            outcome.errors.append("the tests never imported what is broken")
        outcome.errors += [
            f"{name} is {file}, elsewhere" for name, file in _of_ours() if not file.is_relative_to(ROOT)
        ]
        outcome.seconds = sum(os.times()[:4])
        Path("outcome.json").write_text(json.dumps(vars(outcome)))
        code = 0
    finally:
        os._exit(code)


def _break(path: str, source: str) -> list[str]:
    """Let a file be imported as if it held another text; return where it is noted that it was."""
    loaded: list[str] = []
    get_code = SourceFileLoader.get_code

    def broken(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        if loader.path != path:
            return get_code(loader, fullname)
        loaded.append(fullname)
        return compile(source, path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = broken
    return loaded


def _of_ours() -> list[tuple[str, Path]]:
    """Name every module of ours that is imported, but this one, with its file."""
    return [
        (name, Path(str(module.__file__)))
        for name, module in sys.modules.items()
        if name.partition(".")[0] in OURS and name != __name__ and getattr(module, "__file__", None)
    ]
