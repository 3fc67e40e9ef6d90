"""Train a cell with a head on the policy unlike that of `value_model="policy"`: `cell.py` with the head's name first.

    python benchmarks/learning/heads.py undetached stories preset:recommended,value_model=policy 0 --data DATA --work runs/learning

linear: `w . stop_gradient(h)`. undetached: a linear head whose value loss trains the policy's body too, as in trl's
`AutoModelForCausalLMWithValueHead`. These are measurements: the package has neither.
"""  # noqa: E501

from __future__ import annotations

import sys
from typing import Any

import cell
from torch import nn

from rlhf_ppo.models import policy_and_value
from rlhf_ppo.models.heads import ValueHead


def undetached() -> None:
    """Let the values' gradient into the policy's states, through a linear head."""
    linear()
    of_policy = policy_and_value.hidden_states

    def hidden_states(*args: Any) -> Any:
        states = of_policy(*args)
        states.detach = lambda: states
        return states

    policy_and_value.hidden_states = hidden_states


def linear() -> None:
    """Keep only the head's last layer."""
    of_two_layers = ValueHead.__init__

    def __init__(self: Any, policy: nn.Module) -> None:
        of_two_layers(self, policy)
        self.score = self.score[-1]

    ValueHead.__init__ = __init__


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    {"undetached": undetached, "linear": linear}[kind]()
    cell.main()
