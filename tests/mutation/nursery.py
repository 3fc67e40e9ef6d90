"""A process that imports the libraries once and bears a child for every mutant, which imports our code only."""

from __future__ import annotations

import ast
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("rlhf_ppo", "tests")
LATE = {("numpy.testing", ""), ("torch.distributed.tensor", "")}
"""What libraries import when first asked for something, here `torch.testing.assert_close`."""

SECONDS = 240
"""The longest that a child may take, and the libraries' imports."""


@dataclass(eq=False)
class Outcome:
    """What pytest did in a sandbox, and a pytest plugin that notes it.

    Attributes:
        passed: Number of tests that passed.
        failed: Tests whose own code failed, and how; of those a mutant is killed.
        errors: Whatever else went wrong: files that cannot be imported, fixtures, pytest itself.
    """

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}: {report.longrepr}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            (self.failed if report.when == "call" else self.errors).append(f"{report.nodeid}: {report.longrepr}")
        elif report.when == "call" and report.passed:
            self.passed += 1


class Nursery:
    """The process; it is spawned, so that it holds nothing of the package, whatever the process of the tests holds."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_bear, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the connection

    def run(self, sandbox: Path, files: Sequence[str]) -> Outcome:
        """Run test files of a sandbox, in this order, up to the first failure.

        Args:
            sandbox: Holds `rlhf_ppo` and `tests`; these are imported, whatever else is installed or on the path.
            files: Paths inside the sandbox.
        """
        try:
            self._connection.send((str(sandbox), list(files)))
            if not self._connection.poll(2 * SECONDS):
                self._process.kill()
                pytest.fail(f"the nursery has not answered for {2 * SECONDS} s")
            code = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(10)
            pytest.fail(f"the nursery is dead, with exit code {self._process.exitcode} ({error!r})")
        assert code == 0, f"the tests did not end: exit code {code} (-{int(signal.SIGALRM)}: not within {SECONDS} s)"
        return Outcome(**json.loads((sandbox / "outcome.json").read_text()))

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(10)
        self._process.kill()


def copy_package(sandbox: Path) -> None:
    """Copy the package into a sandbox, and of the tests all modules that are no tests themselves."""
    ignored = shutil.ignore_patterns("__pycache__", "test_*.py", "demo")
    for room in ("rlhf_ppo", "tests"):
        shutil.copytree(ROOT / room, sandbox / room, ignore=ignored)


def assert_there_once(path: Path, original: str) -> None:
    """Check that a file has what a mutation replaces."""
    found = path.read_text().count(original)
    assert found == 1, f"{original!r} is there {found} times: bring the mutation up to date"


def mutate(path: Path, original: str, mutant: str) -> None:
    """Replace what is there exactly once."""
    assert_there_once(path, original)
    path.write_text(path.read_text().replace(original, mutant))


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
        "REQUIRE_SHARED_DATA": "0",  # sandboxes lie where there is none
        "TOKENIZERS_PARALLELISM": "false",
    }
    from hypothesis import Phase, settings

    # The first example that fails kills: no time goes into finding the smallest one.
    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None, derandomize=True)
    settings.load_profile("mutants")
    while True:
        try:
            sandbox, files = connection.recv()
        except EOFError:
            return
        _import_libraries(Path(sandbox))
        if (child := os.fork()) == 0:
            _test(Path(sandbox), files)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _import_libraries(sandbox: Path) -> None:
    """Import what the sandbox's files import, but nothing of ours."""
    for module, name in {*LATE, *_imports(sandbox)} - _imported:
        _imported.add((module, name))
        if module.partition(".")[0] not in OURS:
            with suppress(ImportError):  # the child will say so
                getattr(importlib.import_module(module), name, None)  # transformers imports some names when asked
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    assert not _of_ours()
    gc.collect()
    gc.freeze()


_imported: set[tuple[str, str]] = set()


def _imports(sandbox: Path) -> Iterator[tuple[str, str]]:
    for path in sandbox.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((str(node.module), alias.name) for alias in node.names)


def _test(sandbox: Path, files: Sequence[str]) -> None:
    """Run pytest and leave the process, in every case."""
    code = 1
    try:
        signal.alarm(SECONDS)  # ends the process
        sys.dont_write_bytecode = True
        os.chdir(sandbox)
        sys.path.insert(0, str(sandbox))
        for name in [name for name, _ in _of_ours()] + ["tests", "tests.mutation"]:
            sys.modules.pop(name, None)
        Path("pytest.ini").write_text("[pytest]\n")
        outcome = Outcome()
        options = "-c pytest.ini -x -p no:terminal -p no:cacheprovider --import-mode=importlib --assert=plain"
        ended = pytest.main([*options.split(), *files], plugins=[outcome])
        if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            outcome.errors.append(f"pytest: {ended!r}")
        outcome.errors += [
            f"{name} is {file}, outside the sandbox" for name, file in _of_ours() if not file.is_relative_to(sandbox)
        ]
        (sandbox / "outcome.json").write_text(json.dumps(vars(outcome)))
        code = 0
    finally:
        os._exit(code)


def _of_ours() -> list[tuple[str, Path]]:
    """Name every module of ours that is imported, but this one, with its file."""
    return [
        (name, Path(str(module.__file__)))
        for name, module in sys.modules.items()
        if name.partition(".")[0] in OURS and name != __name__ and getattr(module, "__file__", None)
    ]
