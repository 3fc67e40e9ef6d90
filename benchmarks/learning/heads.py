"""Train a cell with another head on the policy than `value_model="policy"` has: `cell.py` with a word before.

    python benchmarks/learning/heads.py undetached stories preset:recommended,value_model=policy 0 --data DATA --work runs/learning

undetached: the value loss trains the policy's body too, as in trl's `AutoModelForCausalLMWithValueHead`. two-layer:
`w . gelu(A h + b)`, with as many hidden units as the state has numbers, w zero at the start. These are measurements:
the package has neither.
"""  # noqa: E501

from __future__ import annotations

import sys
from typing import Any

import cell
from torch import nn

from rlhf_ppo.models import policy_and_value
from rlhf_ppo.models.heads import ValueHead


def undetached() -> None:
    """Let the values' gradient into the policy's states."""
    of_policy = policy_and_value.hidden_states

    def hidden_states(*args: Any) -> Any:
        states = of_policy(*args)
        states.detach = lambda: states
        return states

    policy_and_value.hidden_states = hidden_states


def two_layer() -> None:
    """Put a hidden layer into the head."""
    of_one_layer = ValueHead.__init__

    def __init__(self: Any, policy: nn.Module) -> None:
        of_one_layer(self, policy)
        width, device = self.score.in_features, self.score.weight.device
        self.score = nn.Sequential(nn.Linear(width, width, device=device), nn.GELU(), self.score)

    ValueHead.__init__ = __init__


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    {"undetached": undetached, "two-layer": two_layer}[kind]()
    cell.main()
