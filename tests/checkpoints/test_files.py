"""Files that appear in one piece and follow no links, in the package's own functions and in whole runs."""

from __future__ import annotations

import ast
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.checkpoints import files
from rlhf_ppo.checkpoints.files import (
    MANIFEST_NAME,
    find_damage,
    hash_share,
    parse_json,
    read_object,
    replacing,
    write_json,
    write_manifest,
    write_text,
)
from rlhf_ppo.config.validation import Interval
from tests.faults.conftest import make_saving

PACKAGE = Path(__file__).parents[2] / "rlhf_ppo"
WRITERS = {
    *("write_text", "write_bytes", "savefig", "to_csv", "to_parquet", "to_json", "save_to_json", "write_table"),
    *("save", "save_file", "copy", "copy2", "copyfile", "copytree", "move", "dump", "touch", "symlink_to", "tofile"),
}
INTO_A_NEW_CHECKPOINT = {
    "checkpoints/state.py": 1,
    "models/reference.py": 1,
    "processes/distributed.py": 1,
    "training/run_state.py": 2,  # one of them in memory
    "training/saving.py": 1,  # or into a directory after `remove_links`
}
"""How many files the libraries write in a directory that `start_checkpoint` has made, where nobody planted a link."""


# ---- One way to write ----


def written_names(tree: ast.AST) -> set[str]:
    """Names that `with replacing(...) as name` gives."""
    items = [item for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items]
    return {
        item.optional_vars.id
        for item in items
        if isinstance(item.context_expr, ast.Call)
        and getattr(item.context_expr.func, "id", "") == "replacing"
        and isinstance(item.optional_vars, ast.Name)
    }


def writes(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that write a file at a place of their own, not at one that `replacing` gives; "x" follows no link."""
    safe = written_names(tree)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        owner = getattr(call.func, "value", None)
        parts = [part for part in (owner, *call.args) if part is not None]
        given = {node.id for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)}
        if name == "open" and opens_to_write(call):
            yield call
        elif name in WRITERS and call.args and not given & safe and not is_own(name, owner):
            yield call


def opens_to_write(call: ast.Call) -> bool:
    if getattr(getattr(call.func, "value", None), "id", "") == "os":
        return ast.unparse(call.args[0]) != "os.devnull"
    given = [*call.args[:2], *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [mode.value for mode in given if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
    checked = any(getattr(word.value, "id", "") == "open_no_follow" for word in call.keywords)
    return not checked and any(set(mode) & set("wa+") and len(mode) < 4 for mode in modes)


def is_own(name: str, owner: ast.expr | None) -> bool:
    if name == "write_text" and owner is None:  # the function of `jsonfile`
        return True
    if name == "dump":  # into memory
        return ast.unparse(owner).lower().startswith("pickler") if owner is not None else False
    if name in ("copy", "move"):
        return getattr(owner, "id", "") != "shutil"
    return name == "save" and getattr(owner, "id", "") not in ("torch", "np", "numpy")


def test_all_files_are_written_by_the_function_that_follows_no_links() -> None:
    found = {
        str(path.relative_to(PACKAGE)): sum(1 for _ in writes(ast.parse(path.read_text("utf-8"))))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "files.py"
    }
    assert {name: number for name, number in found.items() if number} == INTO_A_NEW_CHECKPOINT


# ---- What it does ----


def test_a_link_is_replaced_and_its_target_keeps_its_content(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "run.json"
    victim.write_text("mine")
    for planted in ("run.json", "run.json.tmp"):
        (tmp_path / planted).symlink_to(victim)
    write_json(link, {"a": 1})
    assert (victim.read_text(), read_object(link), link.is_symlink()) == ("mine", {"a": 1}, False)
    assert {path.name for path in tmp_path.iterdir()} == {"victim", "run.json", "run.json.tmp"}


def test_a_directory_that_is_a_link_is_written_into(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    write_text(tmp_path / "run" / "a.txt", "ä\ud800")
    assert (tmp_path / "disk" / "a.txt").read_text(encoding="utf-8") == "ä?"


def test_an_error_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_the_error_of_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """`write` alone does not: its `OSError` has no file name."""
    path = tmp_path / "report.html"
    with pytest.raises(OSError, match=r"No space left on device.*report\.html"), replacing(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_permissions_are_those_that_the_umask_asks_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a.txt", "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640


def test_what_is_no_file_is_neither_written_nor_read(tmp_path: Path) -> None:
    """A FIFO without anybody at its other end would block for ever."""
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "folder.json").mkdir()
    for name in ("fifo.json", "folder.json"):
        with pytest.raises(FileExistsError, match=f"{name} is not a regular file"):
            write_json(tmp_path / name, {})
        with pytest.raises(ValueError, match=f"its {name} is not a regular file"):
            read_object(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"3", b"\xff\xfe", b"[" * 9999, b"1" * 9999])
def test_what_is_no_object_is_said_by_the_files_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^its a\.json (is cut off or no JSON|holds no JSON object)$"):
        read_object(tmp_path / "a.json")


@pytest.mark.parametrize("value", ["null", '"1"', "true", "[]", "NaN", "Infinity", "-1", "2", "1e400"])
def test_a_value_of_another_kind_is_said_by_file_and_key(value: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'{{"rate": {value}}}')
    with pytest.raises(ValueError, match=r"^its a\.json has rate="):
        read_object(tmp_path / "a.json", {"rate": Interval(0, 1)})
    with pytest.raises(ValueError, match=r"^its a\.json lacks name$"):
        read_object(tmp_path / "a.json", {"name": str})
    assert parse_json("[1, 2]") == [1, 2]


def test_each_process_hashes_its_share_and_the_manifest_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "c/d", "c/e", "f"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_manifest(str(tmp_path))
    alone = (tmp_path / MANIFEST_NAME).read_bytes()

    hashed: list[str] = []
    original: Any = files._synced_hash

    def noting(path: Path) -> str:
        hashed.append(str(path.relative_to(tmp_path)))
        return original(path)

    monkeypatch.setattr(files, "_synced_hash", noting)
    shares = [hash_share(str(tmp_path), index, 2) for index in range(2)]
    assert [sorted(share) for share in shares] == [["a", "c/d", "f"], ["b", "c/e"]]
    (tmp_path / MANIFEST_NAME).unlink()
    write_manifest(str(tmp_path), shares[0] | shares[1])
    assert (tmp_path / MANIFEST_NAME).read_bytes() == alone and sorted(hashed) == names
    write_manifest(str(tmp_path), shares[1])  # what no process was asked for is hashed here
    assert (tmp_path / MANIFEST_NAME).read_bytes() == alone and find_damage(str(tmp_path)) is None


# ---- Whole runs ----


def files_of(run: Path) -> set[str]:
    """What a run writes at fixed names, outside of its checkpoints."""
    found = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    return {str(path) for path in found if not path.parts[0].startswith("checkpoint-")}


def train(output_dir: Path) -> None:
    trainer: Any = make_saving(output_dir, num_sample_generations=1)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()
    trainer.generate_completions()


def test_a_run_writes_through_no_link_that_was_planted_in_its_directory(tmp_path: Path) -> None:
    train(tmp_path / "first")
    names = files_of(tmp_path / "first")
    assert {"config.json", "README.md", "ppo_run.json", "training_args.bin"} <= names
    run, victims = tmp_path / "run", tmp_path / "victims"
    for name in sorted(names | {f"{name}.tmp" for name in names}):
        link, victim = run / name, victims / name
        for place in (link, victim):
            place.parent.mkdir(parents=True, exist_ok=True)
        victim.write_text("mine")
        link.symlink_to(victim)
    train(run)
    assert {path.relative_to(victims): path.read_text() for path in victims.rglob("*") if path.is_file()} == {
        path.relative_to(victims): "mine" for path in victims.rglob("*") if path.is_file()
    }
    assert not {name for name in names if (run / name).is_symlink()}
