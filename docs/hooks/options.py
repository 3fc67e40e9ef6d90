"""Tables of options and of public objects: `python docs/hooks/options.py` writes them into the pages.

A table of options stands between `<!-- options: Rollout -->` and `<!-- end -->`. A group is the fields of a class of
`rlhf_ppo/config`, or those below a comment `# --- Rollout ---` in it. `<!-- refused: rejected -->` begins a table of
`hints.yaml`. A table of objects stands before each comment `<!-- mkdocs ... -->`, from which the built page is made.
"""

import ast
import html
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[1]
CONFIG = DOCS.parent / "rlhf_ppo" / "config"
OPTIONS = re.compile(r"^<!-- options: ([^\n]+) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
REFUSED = re.compile(r"^<!-- refused: (\w+) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
OBJECTS = re.compile(
    r"(?:^<!-- objects -->$.*?^<!-- end -->\n\n)?^<!-- mkdocs\n::: ([\w.]+)\n(.*?)^-->$", re.MULTILINE | re.DOTALL
)
TITLE = re.compile(r"    # --- (.+) ---")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let mkdocstrings read what is a comment elsewhere; called by mkdocs for each page."""
    return re.sub(r"^<!-- mkdocs\n(.*?)^-->$", r"\1", markdown, flags=re.MULTILINE | re.DOTALL)


def with_tables(markdown: str) -> str:
    """Return a page with its tables as the code is now."""
    found = groups()
    names = {name for group in found.values() for name in group}
    markdown = OPTIONS.sub(lambda match: _between(f"options: {match[1]}", _options(found[match[1]], names)), markdown)
    markdown = REFUSED.sub(lambda match: _between(f"refused: {match[1]}", _refused(match[1])), markdown)
    return OBJECTS.sub(
        lambda match: (
            f"{_between('objects', _objects(match[1], yaml.safe_load(match[2])['options']))}\n\n"
            f"<!-- mkdocs\n::: {match[1]}\n{match[2]}-->"
        ),
        markdown,
    )


def _between(title: str, table: str) -> str:
    return f"<!-- {title} -->\n\n{table}\n\n<!-- end -->"


def _objects(path: str, settings: dict[str, Any]) -> str:
    """Return a row for each object of a module or class that the built page shows, or for the object itself."""
    place = pkgutil.resolve_name(path)
    hidden = [pattern[1:] for pattern in settings.get("filters", ()) if pattern != "!.*"] + ["^_"]
    own = [name for name, value in vars(place).items() if getattr(value, "__module__", "") == path]
    members = settings.get("members") or [name for name in own if not any(re.search(each, name) for each in hidden)]
    shown = {name: getattr(place, name) for name in members} or {path.rpartition(".")[2]: place}
    rows = ["| Name | Does |", "|---|---|"]
    for name, value in shown.items():
        if not value.__module__.startswith("rlhf_ppo"):
            rows.append(f"| `{name}` | As in `transformers.Trainer`. |")
            continue
        does = " ".join(str(inspect.getdoc(value)).partition("\n\n")[0].split())
        does = re.sub(r"(?<!\\)\|", r"\\|", marked(does, set()))
        rows.append(f"| `{name}{_arguments(value)}` | {does} |")
    return "\n".join(rows)


def _arguments(value: Any) -> str:
    if inspect.isclass(value):
        return ""
    return f"({', '.join(name for name in inspect.signature(value).parameters if name != 'self' and name[0] != '_')})"


def groups() -> dict[str, dict[str, tuple[str, str]]]:
    """Return each group's options: name, default and help."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for path in sorted(CONFIG.glob("*.py")):
        lines = path.read_text().splitlines()
        for kind in (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)):
            for field in _fields(kind):
                titles = (TITLE.fullmatch(line) for line in reversed(lines[kind.lineno : field.lineno]))
                group = next((title[1] for title in titles if title), kind.name)
                found.setdefault(group, {})[ast.unparse(field.target)] = _default_and_help(field.value)
    return found


def _fields(kind: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    for node in kind.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and len(node.value.args) > 1:
            yield node


def _default_and_help(call: Any) -> tuple[str, str]:
    return ast.unparse(call.args[0]), ast.literal_eval(call.args[1])


def _options(options: dict[str, tuple[str, str]], names: set[str]) -> str:
    rows = ["| Option | Default | Meaning |", "|---|---|---|"]
    for name, (default, text) in options.items():
        rows.append(f'| <span id="{name}"></span>`{name}` | `{default}` | {marked(text, names)} |')
    return "\n".join(['<div class="options" markdown>', "", *rows, "", "</div>"])


def _refused(table: str) -> str:
    """Return the rows of `removed`, `rejected` or `rejected_values`."""
    hints = yaml.safe_load((CONFIG / "hints.yaml").read_text(encoding="utf-8"))[table]
    tables = hints if table == "rejected_values" else {"": hints}
    rows = []
    for argument, by_advice in tables.items():
        for advice, names in by_advice.items():
            for name in names:
                accepted = f"not `{name}`" if argument else f"`{names[name]!r}`" if table == "rejected" else "none"
                rows.append(f"| `{argument or name}` | {accepted} | {marked(advice, set())} |")
    return "\n".join(["| Argument | Accepted | Instead |", "|---|---|---|", *sorted(rows)])


def marked(text: str, names: set[str]) -> str:
    """Escape a text for a cell of a table; names of options become code."""
    parts = re.split(r"`([^`]+)`", text)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"`{part}`"
            continue
        words = re.split(r"(?<![\w<])([a-z]+(?:_\w+)+)(?![\w>])", part)
        parts[index] = "".join(
            f"`{word}`"
            if i % 2 and (word in names or not names)
            else re.sub(r"([_*|\[\]])", r"\\\1", html.escape(word, quote=False))
            for i, word in enumerate(words)
        )
    return "".join(parts)


if __name__ == "__main__":
    for page in (DOCS / "config.md", DOCS / "reference.md"):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
