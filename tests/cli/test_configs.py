"""`rlhf-ppo configs`: what documented commands name is written, from a wheel as from a checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rlhf_ppo.cli import main as module
from rlhf_ppo.cli.main import configs

ROOT = Path(__file__).parents[2]
SHIPPED = [
    path
    for files in ("accelerate_configs/*.yaml", "examples/*.py", "examples/*.yaml")
    for path in sorted(ROOT.glob(files))
]


def test_every_configuration_and_example_is_written(tmp_path, capsys):
    written = configs([str(tmp_path / "new" / "place")])

    assert len(SHIPPED) > 15
    assert [path.relative_to(tmp_path / "new/place") for path in written] == [p.relative_to(ROOT) for p in SHIPPED]
    assert all(copy.read_bytes() == own.read_bytes() for copy, own in zip(written, SHIPPED, strict=True))
    assert "python examples/first_run.py" in capsys.readouterr().out


def test_a_file_that_is_there_is_replaced_only_when_told(tmp_path, capsys):
    own = tmp_path / "examples" / "ppo.py"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(SystemExit) as ended:
        configs([str(tmp_path)])

    assert ended.value.code == 2 and own.read_text() == "mine"
    assert f"these files exist with other contents: {own}; add --overwrite" in capsys.readouterr().err
    assert not (tmp_path / "accelerate_configs").exists()  # all or nothing

    configs([str(tmp_path), "--overwrite"])
    configs([str(tmp_path)])  # the same files once more
    assert own.read_bytes() == (ROOT / "examples" / "ppo.py").read_bytes()


@pytest.mark.slow
def test_the_wheel_holds_what_the_command_writes(tmp_path, monkeypatch):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    page = Path("rlhf_ppo/reporting/page")
    assert {path.name for path in (tmp_path / "site" / page).iterdir()} == {
        path.name for path in (ROOT / page).iterdir()
    }

    assert len(list((tmp_path / "site" / "rlhf_ppo" / "presets").glob("*.yaml"))) == 5
    monkeypatch.setattr(module, "SHIPPED", tmp_path / "site" / "rlhf_ppo" / "shipped")
    written = configs([str(tmp_path / "here")])
    assert [path.relative_to(tmp_path / "here") for path in written] == [path.relative_to(ROOT) for path in SHIPPED]
