"""The rooms of the package and what keeps them readable; the reasons are in docs/adr/."""

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rlhf_ppo import PPOTrainer
from rlhf_ppo.config.ppo_config import Sizes

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rlhf_ppo"
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]
INNER_FILES = [path for path in FILES if path != PACKAGE / "__init__.py"]

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAP = CONTRIBUTING.partition("## The map")[2].partition("\n## ")[0]
ROOMS = re.findall(r"^\| `(\w+)(?:\.py)?` \|", MAP, re.MULTILINE)
"""The rows of CONTRIBUTING's map: a room imports from itself and from those above it, never from one below it."""
MAX_CODE_LINES = 450  # in a file, without docstrings, comments and blank lines
LONGER = {"rlhf_ppo/config/ppo_config.py": 520}  # the options are one dataclass
MAX_FUNCTION_LINES = 60  # with the docstring, without the signature
DERIVED = {field.name for field in dataclasses.fields(Sizes)} - {"total_episodes"}
OTHER_ARGUMENTS = {"rlhf_ppo/cli/answers.py"}  # whose batch_size is an option of that command


def room_of(path: Path) -> str:
    """The first part of a module's path: `models` for rlhf_ppo/models/heads.py, `trainer` for rlhf_ppo/trainer.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, anywhere in it; relative imports are resolved."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join((*above, *([node.module] if node.module else [])))
            inner = [f"{module}.{alias.name}" for alias in node.names]
            files = [ROOT / f"{name.replace('.', '/')}.py" for name in inner]
            yield from (name if file.is_file() else module for name, file in zip(inner, files, strict=True))


def imported_files(path: Path) -> set[Path]:
    """Files of the package that a file imports."""
    names = (name.replace(".", "/") for name in imported_modules(path) if name.startswith("rlhf_ppo"))
    found = (ROOT / f"{name}.py" for name in names)
    return {each if each.is_file() else each.with_suffix("") / "__init__.py" for each in found} - {path}


def num_code_lines(path: Path) -> int:
    source = path.read_text()
    strings = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    docs = [node for node in strings if isinstance(node.value, ast.Constant)]
    skipped = {line for node in docs for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(source.splitlines(), start=1)
    return sum(1 for number, line in lines if number not in skipped and line.strip() and line.strip()[0] != "#")


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) == "algorithm"], ids=lambda path: path.name)
def test_the_algorithm_imports_only_torch_and_itself(path):
    allowed = {"torch", *sys.stdlib_module_names}

    foreign = [
        name
        for name in imported_modules(path)
        if name.split(".")[0] not in allowed and not name.startswith("rlhf_ppo.algorithm")
    ]

    assert foreign == []


def test_imports_go_one_way():
    upward = [
        f"{path.relative_to(PACKAGE)} imports {other.relative_to(PACKAGE)}"
        for path in INNER_FILES
        for other in imported_files(path)
        if other != PACKAGE / "__init__.py" and ROOMS.index(room_of(other)) > ROOMS.index(room_of(path))
    ]

    assert upward == []


@pytest.mark.parametrize("room", sorted({room_of(path) for path in FILES}))
def test_imports_inside_a_room_form_no_circle(room):
    """Also imports for type checkers only."""
    files = [path for path in FILES if room_of(path) == room]
    circle: list[Path] = []
    try:
        TopologicalSorter({path: imported_files(path) & {*files} for path in files}).prepare()
    except CycleError as error:
        circle = error.args[1]

    assert [path.name for path in circle] == []


def test_the_map_shows_every_room():
    assert sorted(ROOMS) == sorted({room_of(path) for path in INNER_FILES})


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_optional_packages_are_imported_where_they_are_used(path):
    statements = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0]
        for node in statements
        for alias in node.names
    }
    assert not names & {"deepspeed", "math_verify", "optuna", "peft", "tensorboard", "vllm", "wandb"}


WITHOUT_OPTIONAL = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys(("bitsandbytes", "deepspeed", "math_verify", "optuna", "peft", "vllm", "wandb"))
import rlhf_ppo
for module in pkgutil.walk_packages(rlhf_ppo.__path__, "rlhf_ppo."):
    if module.name != "rlhf_ppo.__main__":
        importlib.import_module(module.name)
"""


def test_every_module_is_imported_without_the_optional_packages():
    """Also names of other libraries that exist only beside them, such as accelerate's for DeepSpeed."""
    ran = subprocess.run([sys.executable, "-c", WITHOUT_OPTIONAL], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_there_is_no_drawer():
    assert [name for name in NAMES if re.search(r"(^|/|_)(utils?|misc|common)\.py$", name)] == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_package_knows_nothing_of_the_test_data(path):
    assert not re.search(r"\bshared/", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_and_functions_stay_short(path):
    tree = ast.parse(path.read_text())
    long_functions = {
        node.name: length
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := (node.end_lineno or 0) - node.body[0].lineno + 1) > MAX_FUNCTION_LINES
    }

    assert long_functions == {}
    assert num_code_lines(path) <= LONGER.get(str(path.relative_to(ROOT)), MAX_CODE_LINES)


def derived_names_read(tree: ast.AST) -> list[str]:
    """What a module reads of the configuration that is also in `Sizes`, where it is an int and never None."""
    read = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in DERIVED)
    holders = (node for node in read if isinstance(node.value, ast.Name | ast.Attribute))
    return [ast.unparse(node) for node in holders if re.search(r"(^|[._])(args|config)$", ast.unparse(node.value))]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_counts_are_read_from_sizes(path):
    if str(path.relative_to(ROOT)) not in OTHER_ARGUMENTS:
        assert derived_names_read(ast.parse(path.read_text())) == []


def test_the_trainer_has_no_hidden_parents():
    ours = [parent.__name__ for parent in PPOTrainer.__mro__ if parent.__module__.startswith("rlhf_ppo")]

    assert ours == ["PPOTrainer", "TrainerBase", "Steps"]  # `Steps` declares what PPOTrainer defines, and has no code


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_trainer_is_passed_as_anything(path):
    """What takes a trainer says what it reads of it: a `Protocol`, or explicit arguments."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    untyped = [
        f"{function.name}({argument.arg}: Any)"
        for function in functions
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if argument.arg in ("self", "trainer") and argument.annotation and "Any" in ast.unparse(argument.annotation)
    ]

    assert untyped == []


def written_raw(tree: ast.AST) -> list[str]:
    """Calls of `print` with a text, and of loggers that do not make their messages visible."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    prints = [call for call in calls if ast.unparse(call.func) == "print" and call.args]
    loggers = [
        call for call in calls if ast.unparse(call) in ("logging.getLogger(__name__)", "logging.get_logger(__name__)")
    ]
    return [ast.unparse(call) for call in (*prints, *loggers)]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_what_is_printed_and_logged_is_visible(path):
    """`print_text` and `visible_logger` show what a model, a server or a data set says, and obey nothing of it."""
    assert written_raw(ast.parse("print(x); print(); logging.getLogger(__name__)")) == [
        "print(x)",
        "logging.getLogger(__name__)",
    ]
    if path != PACKAGE / "terminal.py":
        assert written_raw(ast.parse(path.read_text())) == []
        assert "rich.text" not in imported_modules(path)  # `cell` makes the texts of tables
