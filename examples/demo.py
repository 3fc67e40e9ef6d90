"""RLHF from nothing, in minutes on two cores: a toy language model, a reward model, PPO, and a judge.

    python examples/demo.py [output_dir]

Exits with 1 if the held-out judge does not clearly prefer the stories told after PPO.
"""

import sys
import warnings
from pathlib import Path

from rlhf_ppo.demo.run import run_demo

if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)  # from one library to another
    output_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "demo_output")
    sys.exit(0 if run_demo(output_dir).verdicts.clear else 1)
