"""The reference shows every public name that the pages use, and every public method of every class that it shows."""

import builtins
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import rlhf_ppo

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUR_TABLES = {"LLMTrainingParams"}  # docs/command-line.md has its options as a table
ENTRY = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.MULTILINE)


def entries() -> list[tuple[str, dict[str, Any]]]:
    """What the pages show, with the options of each."""
    found = [match for page in PAGES for match in ENTRY.findall(page.read_text() + "\n")]
    return [(name, (yaml.safe_load(options) or {}).get("options", {})) for name, options in found]


def shown() -> set[str]:
    """Names of functions and classes in the reference."""
    names = set()
    for target, options in entries():
        thing = pkgutil.resolve_name(target)
        own = options.get("members") if isinstance(thing, ModuleType) else None
        all_of_it = [name for name in vars(thing) if not name.startswith("_")] if isinstance(thing, ModuleType) else []
        names |= {target.rpartition(".")[2], *(own or all_of_it)}
    return names


def public_methods(of: type) -> set[str]:
    ours = [base for base in of.__mro__ if base.__module__.startswith("rlhf_ppo")]
    functions = (property, classmethod, staticmethod)
    return {
        name
        for base in ours
        for name, value in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, functions))
    }


def test_names_that_snippets_import_are_in_the_reference() -> None:
    imports = [
        line
        for page in PAGES
        for line in re.findall(r"^from rlhf_ppo\S* import (.+)$", page.read_text(), re.MULTILINE)
    ]
    names = {name for line in imports if "rlhf_ppo.cli.demo" not in line for name in re.findall(r"\w+", line)}

    assert (names | set(rlhf_ppo.__all__)) - shown() - OUR_TABLES - {
        "openings",
        "DemoSize",
        "train_language_model",
    } == set()


def test_errors_that_pages_name_are_in_the_reference() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(\w+Error|RunStopped)\b", page.read_text())}

    assert "InUseError" in named and named - shown() - vars(builtins).keys() == set()


CLASSES = [(name, options) for name, options in entries() if isinstance(pkgutil.resolve_name(name), type)]


@pytest.mark.parametrize(
    ("name", "options"), [entry for entry in CLASSES if "members" in entry[1]], ids=lambda it: str(it)
)
def test_a_class_that_lists_its_members_lists_all_public_methods(name, options) -> None:
    methods = public_methods(pkgutil.resolve_name(name))

    assert methods and methods - set(options["members"]) == set()


@pytest.mark.parametrize("name", [name for name, options in CLASSES if "members" not in options])
def test_methods_of_the_other_classes_have_what_is_shown(name) -> None:
    """A method without a docstring would be left out of the page."""
    thing = pkgutil.resolve_name(name)

    assert [method for method in public_methods(thing) if not inspect.getdoc(getattr(thing, method))] == []


def test_each_level_of_the_navigation_has_six_to_eight_entries_and_the_readme_ninety_lines() -> None:
    levels = [yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())["nav"]]
    for level in levels:
        levels += [entry for each in level for entry in each.values() if isinstance(entry, list)]
        assert 6 <= len(level) <= 8, level
    assert len(levels) == 7
    assert len((DOCS.parent / "README.md").read_text().splitlines()) <= 90
