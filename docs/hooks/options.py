"""Tables of the options on the page that names their groups: `<!-- options: Rollout -->`.

A group is the fields of a class of `rlhf_ppo/config`, or those below a comment `# --- Rollout ---` in it.
`<!-- refused: REJECTED -->` shows a table of `inherited.py` there, and REMOVED that of `hints.yaml`.
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
    tables = constants(CONFIG / "inherited.py") | {"REMOVED": removed()}
    return REFUSED.sub(lambda match: _refused(tables[match[1]]), markdown)


def removed() -> dict[str, str]:
    """Return the advice for each argument that transformers no longer has."""
    advice = yaml.safe_load((CONFIG / "hints.yaml").read_text(encoding="utf-8"))["removed"]
    return dict(sorted((name, text) for text, names in advice.items() for name in names))


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


def constants(path: Path) -> dict[str, Any]:
    """Return the module's constants that need none of its imports."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            try:
                found[ast.unparse(target)] = eval(compile(ast.Expression(node.value), str(path), "eval"), {**found})
            except NameError:
                continue
    return found


def _options(options: dict[str, tuple[str, str]], names: set[str]) -> str:
    rows = ["| Option | Default | Meaning |", "|---|---|---|"]
    for name, (default, text) in options.items():
        rows.append(f'| <span id="{name}"></span>`{name}` | `{default}` | {marked(text, names)} |')
    return "\n".join(['<div class="options" markdown>', "", *rows, "", "</div>"])


def _refused(table: dict[str, Any]) -> str:
    rows = []
    for name, entry in table.items():
        if isinstance(entry, dict):
            rows += [f"| `{name}` | not `{value}` | {marked(advice, set())} |" for value, advice in entry.items()]
        elif isinstance(entry, tuple):
            rows.append(f"| `{name}` | `{entry[0]!r}` | {marked(entry[1], set())} |")
        else:
            rows.append(f"| `{name}` | none | {marked(entry, set())} |")
    return "\n".join(["| Argument | Accepted | Instead |", "|---|---|---|", *rows])


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
