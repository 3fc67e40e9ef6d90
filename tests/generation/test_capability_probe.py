"""Prompts generate alike alone and beside longer ones, whatever the model makes of padding and of its cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.generation.sampling import greedy_config
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from rlhf_ppo.models.packing import hidden_states, looked_at
from rlhf_ppo.models.policy_and_value import logits
from tests.models.architectures import tiny_model

PADDING_COUNTS = {"mbart", "marian", "rwkv", "recurrent_gemma"}

ROWS = [[5, 9, 8], [7, 12, 20, 4, 31, 17, 6, 3], [6, 6, 3], [30, 2], [9, 4, 4, 4, 21, 13]]


def respond(model: Any, rows: list[list[int]], make_args: Any) -> torch.Tensor:
    stop = 11
    config = greedy_config(make_args(response_length=9), stop)
    responses = TransformersEngine(8).sample(model, Prompts.of_rows(rows, 0, torch.device("cpu")), config).ids
    ended = (responses == stop).long().cumsum(dim=1) - (responses == stop).long() > 0
    return torch.nn.functional.pad(responses.masked_fill(ended, stop), (0, 9 - responses.shape[1]), value=stop)


@pytest.mark.parametrize("family", ["llama", "gpt2", "rwkv", "mbart", "marian", "mamba", "jamba", "falcon_h1", "zamba",
                                    "lfm2", "recurrent_gemma", "bloom"])  # fmt: skip
def test_a_prompt_alone_and_beside_longer_ones_gets_the_same_greedy_response(family: str, make_args: Any) -> None:
    """Rows end at different tokens, so that some of them are dropped on the way."""
    if family == "zamba" and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("transformers 5.17 refuses its own configuration of Zamba")
    model = tiny_model(family)
    together = respond(model, ROWS, make_args)
    for row, response in zip(ROWS, together, strict=True):
        alone = respond(model, [row], make_args)[0]
        assert response.tolist() == alone.tolist()
        whole = torch.tensor([row + alone.tolist()])
        with torch.no_grad():
            best = logits(model, hidden_states(model, whole, torch.ones_like(whole).bool()))[0].argmax(dim=1)
        real = (alone == 11).long().cumsum(0) - (alone == 11).long() == 0
        assert torch.equal(best[len(row) - 1 : -1][real], alone[real])
    assert looked_at(model).pads_left == (family not in PADDING_COUNTS)
    assert len({len(set(row)) for row in together.tolist()}) > 1
