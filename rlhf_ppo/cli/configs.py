"""`rlhf-ppo configs`: accelerate's configurations and the example scripts, which are part of the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_ppo.cli.errors import CommandParser, user_errors
from rlhf_ppo.terminal.foreign import print_text

PACKAGE = Path(__file__).parents[1]
SHIPPED = PACKAGE / "shipped"
"""Where a wheel has the files; a checkout has them beside the package."""

FOLDERS = {"accelerate_configs": ("*.yaml",), "examples": ("*.py", "*.yaml", "*.ipynb")}
"""What is written: the folders, and the files in them."""


def configs(argv: Sequence[str] | None = None) -> list[Path]:
    """Write `accelerate_configs/` and `examples/` into a directory.

    Args:
        argv: The directory, and `--overwrite`. None takes the program's own.

    Returns:
        The files that were written.

    Raises:
        SystemExit: A file is there already, or cannot be written.
    """
    parser = CommandParser(
        "rlhf-ppo configs", description="Write accelerate's configurations and the example scripts into a directory."
    )
    parser.add_argument("directory", type=Path, nargs="?", default=Path(), help="default: the current one")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    options = parser.parse_args(argv)
    with user_errors(parser.prog):
        written = write_configs(options.directory, options.overwrite)
    for path in written:
        print_text(path)
    print_text(
        f"In {options.directory.resolve()}: accelerate launch --config_file accelerate_configs/deepspeed_zero2.yaml "
        "examples/ppo.py --help"
    )
    return written


def write_configs(directory: Path, overwrite: bool = False) -> list[Path]:
    """Copy the files; none if one of them is there already.

    Args:
        directory: Where to; it is made.
        overwrite: Whether to replace files that are there.

    Returns:
        The files that were written.

    Raises:
        OSError: A file cannot be written.
        ValueError: A file is there already and shall not be replaced, or the directory is a file.
    """
    from rlhf_ppo.checkpoints.jsonfile import write_text  # imports torch, for which --help does not wait

    copies = {
        source: directory / folder / source.name
        for folder, patterns in FOLDERS.items()
        for files in patterns
        for source in sorted((_shipped() / folder).glob(files))
    }
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"directory={str(directory)!r} is a file; name a directory")
    there = [str(path) for path in copies.values() if path.exists()]
    if there and not overwrite:
        raise ValueError(f"{', '.join(there)} {'are' if len(there) > 1 else 'is'} there already: add --overwrite")
    for source, path in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, source.read_text(encoding="utf-8"))
    return list(copies.values())


def _shipped() -> Path:
    """Return the folder that holds the files: inside the package where it is installed, else the checkout."""
    return SHIPPED if SHIPPED.is_dir() else PACKAGE.parent
