"""Tables of the options on the page that names their groups: `<!-- options: Rollout -->`.

A group is the fields of a class of `rlhf_ppo/config`, or those below a comment `# --- Rollout ---` in it.
`<!-- refused: rejected -->` shows a table of `hints.yaml` there.
"""

import ast
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CONFIG = Path(__file__).parents[2] / "rlhf_ppo" / "config"
OPTIONS = re.compile(r"^<!-- options: (.+) -->$", re.MULTILINE)
REFUSED = re.compile(r"^<!-- refused: (\w+) -->$", re.MULTILINE)
TITLE = re.compile(r"    # --- (.+) ---")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the tables where they are named; called by mkdocs for each page."""
    if "<!-- options: " not in markdown:
        return markdown
    found = groups()
    markdown = OPTIONS.sub(lambda match: _options(found[match[1]], {n for g in found.values() for n in g}), markdown)
    return REFUSED.sub(lambda match: _refused(match[1]), markdown)


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
