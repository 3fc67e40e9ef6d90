"""RLHF from nothing, in minutes on two cores: a toy language model, a reward model, PPO, and a judge.

    python examples/demo.py [output_dir]

Exits with 1 if the held-out judge does not clearly prefer the stories told after PPO.
"""

import argparse
import sys
import warnings
from pathlib import Path

from rlhf_ppo.demo.run import run_demo

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path, nargs="?", default=Path("demo_output"), help="default: %(default)s")
    output_dir = parser.parse_args().output_dir
    warnings.simplefilter("ignore", FutureWarning)  # from one library to another
    sys.exit(0 if run_demo(output_dir).verdicts.clear else 1)
