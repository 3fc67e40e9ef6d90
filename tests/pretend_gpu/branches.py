"""List the branches that only CUDA takes, and fail if no test on the pretend GPU executed one of them.

A condition that is listed with its reason, but no longer in the package, fails, too.

Run it after the tests, with the folder of their coverage data: `python tests/pretend_gpu/branches.py .coverage`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from coverage import CoverageData

PACKAGE = Path(__file__).parents[2] / "rlhf_ppo"
NOT_EXECUTED: dict[str, str] = {
    "environments/waiting.py: torch.cuda.current_device() if torch.cuda.is_initialized() else None": (
        "environments run in none of these tests"
    ),
    "config/checks.py: torch.cuda.is_available()": "these tests set bf16; tests/config/test_ppo_config.py",
    "config/checks.py: is_first and (not can) and torch.cuda.is_available()": (
        "for a GPU without bfloat16; tests/config/test_ppo_config.py"
    ),
}
"""Branches that the pretend GPU cannot take, as `file: condition`, with the reason."""
_ON_CUDA = ("is_cuda", "== 'cuda'", "'cuda' in", "torch.cuda.is_available", "torch.cuda.is_initialized", "!= 'cpu'")
_ELSEWHERE = ("!= 'cuda'", "== 'cpu'", "not torch.cuda")


def branches(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each condition on CUDA in a file, and the line that is executed on a GPU alone."""
    statements: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for block in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            for index, statement in enumerate(block if isinstance(block, list) else []):
                if isinstance(statement, ast.If) and _is_of_cuda(statement.test):
                    statements.add(id(statement.test))
                    line = _line_on_cuda(statement, block[index + 1 : index + 2])
                    yield f"{path.relative_to(PACKAGE)}: {ast.unparse(statement.test)}", line
        if isinstance(node, ast.IfExp | ast.BoolOp | ast.keyword) and id(node) not in statements:
            if _is_of_cuda(getattr(node, "test", node)):
                yield f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}", node.lineno


def _line_on_cuda(statement: ast.If, following: list[ast.stmt]) -> int:
    if any(name in ast.unparse(statement.test) for name in _ELSEWHERE):
        return [*statement.orelse, *following, statement][0].lineno
    return statement.body[0].lineno


def _is_of_cuda(condition: ast.AST) -> bool:
    return any(name in ast.unparse(condition) for name in _ON_CUDA + _ELSEWHERE)


def main() -> int:
    """Print a line for each branch; return 1 if one was neither executed nor listed, or is listed but gone."""
    data = CoverageData(no_disk=True)
    for part in Path(sys.argv[1]).iterdir():
        other = CoverageData(str(part))
        other.read()
        data.update(other)
    missing, gone = 0, set(NOT_EXECUTED)
    for path in sorted(PACKAGE.rglob("*.py")):
        executed = set(data.lines(str(path)) or ())
        for condition, line in dict(branches(path)).items():
            gone.discard(condition)
            is_executed, reason = line in executed, NOT_EXECUTED.get(condition)
            missing += not is_executed and reason is None
            print(
                "executed    " if is_executed else f"not executed ({reason or 'NO REASON'})", condition, f"line {line}"
            )
    for condition in sorted(gone):
        print("listed, but in no file", condition)
    return 1 if missing or gone else 0


if __name__ == "__main__":
    sys.exit(main())
