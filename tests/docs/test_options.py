"""The pages of options and objects are current: a row for each option of `PPOConfig`, with its default and help."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from rlhf_ppo import PPOConfig
from rlhf_ppo.config import checks

DOCS = Path(__file__).parents[2] / "docs"
spec = importlib.util.spec_from_file_location("options_hook", DOCS / "hooks" / "options.py")
assert spec is not None and spec.loader is not None
options = importlib.util.module_from_spec(spec)
spec.loader.exec_module(options)
PAGE = (DOCS / "config.md").read_text()


@pytest.mark.parametrize("page", ["config.md", "reference.md"])
def test_the_tables_in_the_files_are_current_and_the_built_page_has_the_directives(page: str) -> None:
    text = (DOCS / page).read_text()
    assert options.with_tables(text) == text, "run python docs/hooks/options.py"
    built = options.on_page_markdown(text)
    assert built.count("\n::: rlhf_ppo.") == text.count("<!-- mkdocs\n") > 0 and "<!-- mkdocs" not in built


def test_every_option_has_one_row() -> None:
    rows = re.findall(r'^\| <span id="(\w+)"></span>`\1` \| `(.*?)` \|', PAGE, re.MULTILINE)
    defaults = {field.name: field.default for field in fields(PPOConfig)}
    inherited_names = {field.name for field in fields(TrainingArguments)}

    assert len(rows) == len({name for name, _ in rows})
    assert {name for name, _ in rows} >= set(defaults) - inherited_names
    for name, default in rows:
        assert repr(defaults[name]) == default or str(defaults[name]) == str(eval(default)), name


def test_every_refused_argument_has_a_row() -> None:
    for table in (checks.REJECTED, checks.REJECTED_VALUES, checks.REMOVED):
        assert all(f"| `{name}` | " in PAGE for name in table)


def test_text_in_angle_brackets_is_shown() -> None:
    assert r"&lt;exp\_name&gt;\_\_&lt;seed&gt;" in PAGE
