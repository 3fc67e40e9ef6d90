"""A cache with room: the tokens and logits of transformers' own, in the type that attention computes in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rlhf_ppo.generation import caches as caching
from rlhf_ppo.generation import transformers_engine
from rlhf_ppo.generation.caches import PreallocatedLayer, PreallocatedSlidingLayer, preallocated_cache
from rlhf_ppo.generation.sampling import changed
from rlhf_ppo.generation.transformers_engine import continues, generate_compacting, generation_needs, sample_responses
from rlhf_ppo.models.unwrapping import CACHE
from tests.generation.test_dropping import given_rows, greedy, model_of
from tests.generation.test_transformers_engine import prompts
from tests.models.architectures import tiny_model

LAYERS = {
    "all": (DynamicLayer, PreallocatedLayer, {}),
    "window": (DynamicSlidingWindowLayer, PreallocatedSlidingLayer, {"sliding_window": 5}),
    "wide window": (DynamicSlidingWindowLayer, PreallocatedSlidingLayer, {"sliding_window": 10}),
}


@pytest.mark.parametrize("block", [1, 3, 128])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_return_and_keep_what_transformers_do(kind: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a prompt, longer than a window or not, single tokens, and rows that leave."""
    monkeypatch.setattr(caching, "_BLOCK", block)
    theirs, ours = (make(**LAYERS[kind][2]) for make in LAYERS[kind][:2])
    num_rows = 4
    for step, length in enumerate((7, 1, 1, 2, *[1] * 9)):
        if step == 6:
            rows = torch.tensor([2, 0])
            theirs.reorder_cache(rows)
            ours.reorder_cache(rows)
            num_rows = 2
        new = torch.randn(2, num_rows, 3, length, 4)
        assert ours.get_mask_sizes(length) == theirs.get_mask_sizes(length)
        for our, their in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert torch.equal(our, their)
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "mistral"])
def test_responses_are_the_same(name: str, autocast: bool) -> None:
    model, (ids, mask) = model_of(name), given_rows(12)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert generation_needs(model).preallocates == {torch.bfloat16 if autocast else None: True}
        ours = generate_compacting(model, ids, mask, greedy(), preallocates=True)
        theirs = generate_compacting(model, ids, mask, greedy())
    assert torch.equal(ours, theirs)


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
        return sample_responses(model, given, config, rows_per_call=12), max(read)

    generation_needs(model)
    assert transformers_engine._repeats(given) and not transformers_engine._repeats(given.take([0, 3, 6, 9]))
    assert continues(model)
    monkeypatch.setattr(model, "forward", seen)
    (each, most), (once, fewer) = sampled(False), sampled(True)
    assert torch.equal(once, each) and len(each.unique(dim=0)) > 4
    assert fewer == 4 * 5 and most == 12 * 6


def test_it_is_in_the_type_that_autocast_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, mask), caches = model_of("llama"), given_rows(4), []
    forward = model.forward

    def seen(**given: Any) -> Any:
        output = forward(**given)
        caches.append(getattr(output, CACHE))
        return output

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr(model, "forward", seen)
        generate_compacting(model, ids, mask, greedy(), preallocates=True)
    types = {value.dtype for cache in caches for layer in cache.layers for value in (layer.keys, layer.values)}
    assert types == {torch.bfloat16}


def test_a_token_is_written_where_there_is_room() -> None:
    layer = PreallocatedLayer()
    layer.update(*torch.randn(2, 3, 2, 5, 4))
    places = set()
    for _ in range(100):
        layer.update(*torch.randn(2, 3, 2, 1, 4))
        keys: Any = layer.keys
        places.add(keys.data_ptr())
    assert len(places) == 1 and keys.shape == (3, 2, 105, 4)


@pytest.mark.parametrize("family", ["jamba", "bamba", "gemma3_text", "qwen3_next", "mamba", "rwkv"])
def test_other_kinds_of_layers_stay(family: str) -> None:
    """Hybrids, whose convolutions and states have layers of their own, and models without any cache of this kind."""
    model = tiny_model(family).eval()
    if cache := preallocated_cache(model):
        plain = DynamicCache(config=model.config)
        replaced = {DynamicLayer: PreallocatedLayer, DynamicSlidingWindowLayer: PreallocatedSlidingLayer}
        assert [type(layer) for layer in cache[CACHE].layers] == [
            replaced.get(type(layer), type(layer)) for layer in plain.layers
        ]
    with torch.no_grad():
        ids, mask = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.ones(2, 3, dtype=torch.long)
        ours = generate_compacting(
            model, ids, mask, greedy(None), preallocates=generation_needs(model).preallocates[None]
        )
        theirs = generate_compacting(model, ids, mask, greedy(None))
    assert torch.equal(ours, theirs)


def test_a_model_that_would_compute_something_else_with_it_keeps_its_own() -> None:
    """Its attention looks at the type of the cache."""
    model = model_of("llama")
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, given: (
            (args, given | {"hidden_states": 2 * given["hidden_states"]})
            if isinstance(getattr(given[CACHE], "layers", [None])[0], PreallocatedLayer)
            else None
        ),
        with_kwargs=True,
    )
    assert generation_needs(model).preallocates == {None: False}
