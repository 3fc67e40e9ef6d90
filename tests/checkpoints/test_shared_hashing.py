"""Processes share the hashing of a checkpoint's files; the manifest is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_ppo.checkpoints import files
from rlhf_ppo.checkpoints.files import MANIFEST_NAME, find_damage, hash_share, write_manifest


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
