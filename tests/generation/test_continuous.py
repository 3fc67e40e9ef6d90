"""Continuous batching: the tokens of `generate`, the distribution that was asked for, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig

from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.generation.continuous import ContinuousEngine, cache_for
from rlhf_ppo.generation.protocol import Sampled
from rlhf_ppo.generation.sampling import greedy_config, sampling_config
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from tests import oracles
from tests.conftest import tiny_policy
from tests.generation.test_transformers_engine import filtered, prompts, scripted_policy
from tests.runs import MakeArgs

RAGGED = ([5, 9, 3], [4], list(range(3, 23)), [8, 8], [30, 2, 7, 7, 7])


def sample(policy: nn.Module, given: Prompts, config: GenerationConfig, max_rows: int = 64, seed: int = 0) -> Sampled:
    torch.manual_seed(seed)
    return ContinuousEngine(max_rows).sample(policy, given, config)


def adapted_policy() -> Any:
    torch.manual_seed(1)
    return get_peft_model(tiny_policy(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


@pytest.mark.parametrize("make_policy", [tiny_policy, adapted_policy])
def test_greedy_tokens_are_those_of_generate(make_args: MakeArgs, make_policy: Callable[[], Any]) -> None:
    """With rows of many lengths that wait for each other, over pages of the cache, in the order of the prompts."""
    policy = make_policy()
    given, config = prompts(*RAGGED, fill=10**6), greedy_config(make_args(response_length=14), stop_token_id=29)
    expected = TransformersEngine(rows_per_call=64).sample(policy, given, config).ids
    assert len({int((row == 29).any()) for row in expected}) == 2, "some rows end early, some do not"
    for max_rows in (2, 64):
        cache = cache_for(RAGGED, 14, max_rows, policy.config)
        assert cache.max_requests_per_batch == min(max_rows, len(RAGGED))
        sampled = sample(policy, given, config, max_rows).ids
        assert sampled.dtype == torch.long and sampled.tolist() == expected.tolist()


@pytest.mark.parametrize("layers", [26, 34])
def test_the_cache_has_space_for_layers_of_two_kinds(make_args: MakeArgs, layers: int) -> None:
    """Of Gemma 3 with 1B and 4B: transformers gives each kind of layers whole sectors."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_attention_heads": 1}
    ends: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = Gemma3TextConfig(vocab_size=32, num_hidden_layers=layers, num_key_value_heads=1, **sizes, **ends)
    policy, given = Gemma3ForCausalLM(config), prompts([5, 9, 3], [4, 8])
    greedy = greedy_config(make_args(response_length=40), stop_token_id=None)
    ContinuousEngine(1).check(policy)
    expected = TransformersEngine(rows_per_call=2).sample(policy, given, greedy).ids
    assert sample(policy, given, greedy, max_rows=1).ids.tolist() == expected.tolist()


def test_where_rows_end(make_args: MakeArgs) -> None:
    """At the stop token, which may have id 0; without one at the length limit, past the model's own EOS, id 1."""
    config = sampling_config(make_args(response_length=9), stop_token_id=12)
    sampled = sample(scripted_policy({}), prompts([10], [7], [3, 9]), config)
    assert sampled.ids.tolist() == [[11, 12, 12, 12, 12], [8, 9, 10, 11, 12], [10, 11, 12, 12, 12]]
    assert not _logprobs(sampled).any(), "sure of each token"

    config = sampling_config(make_args(response_length=6), stop_token_id=0)
    assert sample(scripted_policy({}), prompts([29], [30]), config).ids.tolist() == [[30, 31, 0], [31, 0, 0]]

    config = sampling_config(make_args(response_length=4), stop_token_id=None)
    assert sample(scripted_policy({}), prompts([0], [2]), config).ids.tolist() == [[1, 2, 3, 4], [3, 4, 5, 6]]
    assert config.eos_token_id is None, "what was passed in stays as it is"


def _logprobs(sampled: Sampled) -> torch.Tensor:
    assert sampled.logprobs is not None
    return sampled.logprobs.nan_to_num()  # NaN on filling


@pytest.mark.parametrize(
    "asked", [{}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"temperature": 0.5, "top_k": 5}]
)
def test_tokens_and_logprobs_are_of_the_distribution_asked_for(make_args: MakeArgs, asked: dict[str, Any]) -> None:
    policy, prompt = tiny_policy(), [5, 9, 3]
    args = make_args(response_length=1, **{"temperature": 1.0, **asked})
    probabilities = np.exp(oracles.log_softmax(oracles.logits_after(policy, prompt) / args.temperature))
    expected = filtered(probabilities, args.top_k, args.top_p, args.min_p)

    sampled = sample(policy, prompts(*[prompt] * 600), sampling_config(args, stop_token_id=None), max_rows=600)
    ids, logprobs = sampled.ids[:, 0].numpy(), _logprobs(sampled)[:, 0].numpy()

    np.testing.assert_allclose(logprobs, np.log(expected[ids]), atol=1e-5)
    frequencies = np.bincount(ids, minlength=32) / 600
    assert np.abs(frequencies - expected).max() < 4 * 0.5 / np.sqrt(600)  # four standard deviations at the most


@pytest.mark.parametrize("make_policy", [tiny_policy, adapted_policy])
def test_it_computes_in_the_type_that_it_is_given(make_args: MakeArgs, make_policy: Callable[[], Any]) -> None:
    """Also of weights in two types; they are the same tensors afterwards, where a pass fails, too."""
    policy, config = make_policy(), sampling_config(make_args(response_length=10), stop_token_id=1)
    policy.base_model.layers[0].mlp.to(torch.bfloat16) if make_policy is tiny_policy else None
    before = {name: (value.data_ptr(), value.dtype) for name, value in policy.named_parameters()}
    types: list[torch.dtype] = []
    handle = policy.get_output_embeddings().register_forward_hook(lambda *given: types.append(given[2].dtype))

    torch.manual_seed(0)
    sampled = ContinuousEngine(64, torch.bfloat16).sample(policy, prompts(*RAGGED), config)
    handle.remove()

    assert set(types) == {torch.bfloat16}
    assert before == {name: (value.data_ptr(), value.dtype) for name, value in policy.named_parameters()}
    for weight in policy.parameters():  # not the buffers: rotary frequencies are exact
        weight.data = weight.data.to(torch.bfloat16)
    expected = sample(policy, prompts(*RAGGED), config)
    assert sampled.ids.tolist() == expected.ids.tolist() and torch.equal(_logprobs(sampled), _logprobs(expected))


OWN = {"repetition_penalty": 1.5, "eos_token_id": [1, 5], "suppress_tokens": [3, 4], "top_k": 3, "max_length": 4}


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_nothing_behind_and_takes_nothing_from_the_models_own_config(
    make_args: MakeArgs, training: bool
) -> None:
    policy = tiny_policy(attention_dropout=0.5)
    config = sampling_config(make_args(response_length=8), stop_token_id=1)
    expected = sample(policy, prompts(*RAGGED), config)
    own = policy.generation_config = GenerationConfig(**OWN)
    policy.gradient_checkpointing_enable()
    policy.train(training)
    before = dict(vars(policy)), policy.config.to_dict()

    sampled = sample(policy, prompts(*RAGGED), config)

    assert sampled.ids.tolist() == expected.ids.tolist() and not _logprobs(sampled).requires_grad
    assert policy.training is training and policy.generation_config is own
    assert before == (dict(vars(policy)), policy.config.to_dict())
