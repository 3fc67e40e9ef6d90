"""`rlhf-ppo demo`: all steps with a toy model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rlhf_ppo.cli.errors import CommandParser, user_errors

DESCRIPTION = "RLHF from nothing, in minutes on two cores: a language model, a reward model, PPO, and a judge."


def demo(argv: Sequence[str] | None = None, program: str = "rlhf-ppo demo") -> None:
    """RLHF from nothing, in minutes on two cores: a language model, a reward model, PPO, and a judge.

    Args:
        argv: The directory of the results. None takes the program's own.
        program: What `--help` calls it.

    Raises:
        SystemExit: With 1 if the judge does not clearly prefer what PPO made, with 2 if nothing can be written.
    """
    parser = CommandParser(program, description=f"{DESCRIPTION} Exits with 1 unless the judge clearly prefers PPO's.")
    parser.add_argument("output_dir", type=Path, nargs="?", default=Path("demo_output"), help="default: %(default)s")
    output_dir = parser.parse_args(argv).output_dir
    from rlhf_ppo.demo.run import run_demo
    from rlhf_ppo.training.checks import check_output_dir

    with user_errors(program):
        check_output_dir(str(output_dir))
        output_dir.mkdir(parents=True, exist_ok=True)

    warnings.simplefilter("ignore", FutureWarning)  # from one library to another
    if not run_demo(output_dir).verdicts.clear:
        sys.exit(1)
