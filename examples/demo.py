"""RLHF from scratch, in minutes on two cores: a toy language model, a reward model, PPO, and a judge.

    python examples/demo.py [output_dir]

Exits with 1 if the held-out judge does not clearly prefer the stories told after PPO.
"""

import sys

from rlhf_ppo.cli.main import demo

if __name__ == "__main__":
    demo(sys.argv[1:])
