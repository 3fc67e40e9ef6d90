"""Equal prompts are read once; the tokens are those of rows that each read their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_ppo.generation import transformers_engine
from rlhf_ppo.generation.sampling import changed
from rlhf_ppo.generation.transformers_engine import TransformersEngine, continues
from tests.generation.test_dropping import greedy, model_of
from tests.generation.test_transformers_engine import prompts


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "mistral"])
def test_a_prompt_of_several_rows_is_read_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same samples as when each row reads its prompt, though some rows end and leave; other prompts stay apart."""
    model, read = model_of(name), []
    given = prompts([2, 3, 4, 5, 6, 7], [3, 4, 5], [2, 2], [7, 6, 5, 4, 3]).repeated(3)
    forward = model.forward

    def seen(**inputs: Any) -> Any:
        read.append(inputs["input_ids"].numel())
        return forward(**inputs)

    def sampled(shares: bool) -> tuple[torch.Tensor, int]:
        monkeypatch.setattr(transformers_engine, "_repeats", lambda _: shares)
        torch.manual_seed(0)
        read.clear()
        config = changed(greedy(), do_sample=True)
        return TransformersEngine(rows_per_call=12).sample(model, given, config).ids, max(read)

    assert transformers_engine._repeats(given) and not transformers_engine._repeats(given.take([0, 3, 6, 9]))
    assert continues(model)
    monkeypatch.setattr(model, "forward", seen)
    (each, most), (once, fewer) = sampled(False), sampled(True)
    assert torch.equal(once, each) and len(each.unique(dim=0)) > 4
    assert fewer == 4 * 5 and most == 12 * 6
