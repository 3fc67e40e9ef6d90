"""Shows a notebook where a page says `<!-- notebook: path -->`: its texts, its code, and what that printed."""

import json
import re
from pathlib import Path

NAMED = re.compile(r"^<!-- notebook: (\S+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the notebook's cells where it is named; called by mkdocs for each page."""
    return NAMED.sub(lambda match: cells(Path(match[1])), markdown)


def cells(path: Path) -> str:
    """Write a notebook's cells as Markdown."""
    shown = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        shown.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        shown += [f"```text\n{''.join(output['text'])}```" for output in cell.get("outputs", [])]
    return "\n\n".join(shown)
