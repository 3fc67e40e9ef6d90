"""Sampling: the distribution, when it stops, and that the model's own generation_config has no effect."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GenerationConfig

from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.generation.sampling import greedy_config, sampling_config
from rlhf_ppo.generation.transformers_engine import TransformersEngine, call_sizes
from rlhf_ppo.models.packing import looked_at
from tests import oracles
from tests.conftest import tiny_policy
from tests.runs import MakeArgs


def prompts(*rows: list[int], fill: int = 0) -> Prompts:
    return Prompts.of_rows(rows, fill, torch.device("cpu"))


def scripted_policy(script: dict[int, int]) -> Any:
    """A policy that always says the same after the same token: `script[token]`, else the token plus one."""
    policy = tiny_policy()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        policy.model.norm.weight.fill_(1)
        policy.model.embed_tokens.weight.copy_(torch.eye(32))
        for token in range(32):
            policy.lm_head.weight[script.get(token, (token + 1) % 32), token] = 100.0
    return policy


def count_calls(model: Any) -> list[int]:
    calls: list[int] = []
    looked_at(model)  # which call it too
    model.register_forward_hook(lambda *_: calls.append(1))
    return calls


def sample(
    policy: nn.Module, given: Prompts, config: GenerationConfig, rows_per_call: int = 64, seed: int = 0
) -> Tensor:
    torch.manual_seed(seed)
    return TransformersEngine(rows_per_call).sample(policy, given, config).ids


# ---- When it stops ----


@pytest.mark.parametrize(
    ("rows", "stop", "length", "expected"),
    [
        ([[10], [7], [3, 9]], 12, 20, [[11, 12, 12, 12, 12], [8, 9, 10, 11, 12], [10, 11, 12, 12, 12]]),
        ([[29], [30]], 0, 6, [[30, 31, 0], [31, 0, 0]]),
        ([[0], [2]], None, 4, [[1, 2, 3, 4], [3, 4, 5, 6]]),  # past EOS, id 1
    ],
)
def test_it_stops_when_every_row_has(
    rows: list[list[int]], stop: int | None, length: int, expected: list[list[int]], make_args: MakeArgs
) -> None:
    policy = scripted_policy({})
    calls = count_calls(policy)
    config = sampling_config(make_args(response_length=length), stop_token_id=stop)
    assert sample(policy, prompts(*rows), config).tolist() == expected
    assert len(calls) == len(expected[0])


def test_greedy_takes_the_likeliest(make_args: MakeArgs) -> None:
    policy, tokens = tiny_policy(), [5, 9, 3]
    config = greedy_config(make_args(response_length=6, temperature=5.0, top_k=3), stop_token_id=None)
    responses = sample(policy, prompts(tokens, [4]), config)
    for _ in range(6):
        tokens = [*tokens, int(oracles.logits_after(policy, tokens).argmax())]
    assert responses[0].tolist() == tokens[3:]


# ---- Padding, modes, caches ----


def test_padding_changes_no_sample(make_args: MakeArgs) -> None:
    """Neither its amount nor its ids, which may lie outside the vocabulary."""
    config = greedy_config(make_args(response_length=6), stop_token_id=1)
    policy = tiny_policy()
    alone = sample(policy, prompts([5, 9]), config)
    for fill in (0, 1, 31, 10**6):
        padded = sample(policy, prompts([5, 9], [3, 4, 5, 6, 7], fill=fill), config)
        assert padded[0, : alone.shape[1]].tolist() == alone[0].tolist()


@pytest.mark.parametrize("training", [True, False])
def test_it_samples_in_eval_mode_with_the_cache_and_restores_the_mode(make_args: MakeArgs, training: bool) -> None:
    policy = tiny_policy(attention_dropout=0.5)
    policy.gradient_checkpointing_enable()
    policy.train(training)
    looked_at(policy)  # which call it too
    lengths: list[int] = []
    policy.model.register_forward_hook(lambda module, _, output: lengths.append(output.last_hidden_state.shape[1]))
    modes: list[bool] = []
    policy.register_forward_hook(lambda module, *_: modes.append(module.training))
    config = sampling_config(make_args(response_length=5), stop_token_id=None)
    assert not sample(policy, prompts([5, 9, 4]), config).requires_grad
    assert lengths == [3, 1, 1, 1, 1] and not any(modes)
    assert policy.training is training


# ---- The model's own generation_config ----

OWN = {
    "repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 3,
    "eos_token_id": [1, 5, 6],
    "suppress_tokens": [3, 4],
    "min_p": 0.3,
    "top_k": 3,
    "top_p": 0.5,
    "temperature": 3.0,
    "max_length": 4,
    "forced_eos_token_id": 1,
}


@pytest.mark.parametrize("make_config", [sampling_config, greedy_config])
@pytest.mark.parametrize("adapted", [False, True], ids=["full model", "adapter"])
def test_what_is_stored_with_the_model_changes_nothing(make_args: MakeArgs, make_config: Any, adapted: bool) -> None:
    def policy(**own: Any) -> Any:
        model = tiny_policy()
        model.generation_config = GenerationConfig(**own)
        return get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if adapted else model

    config, given = make_config(make_args(response_length=12, temperature=1.3), 1), prompts([5, 9], [3, 4, 7, 8])
    plain = sample(policy(), given, config)
    assert plain.shape[1] > 4
    assert torch.equal(sample(policy(**OWN), given, config), plain)
    for name, value in OWN.items():
        assert torch.equal(sample(policy(**{name: value}), given, config), plain), name


# ---- The distribution ----

FALSE_ALARM = 1e-6
"""How often each test of the distribution would fail for a right sampler, were its seed drawn anew."""


def chi_square_quantile(degrees: int, tail: float) -> float:
    """Wilson-Hilferty's approximation of the `1 - tail` quantile, within 1% here."""
    z = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - tail, dtype=torch.float64)))
    return degrees * (1 - 2 / (9 * degrees) + z * np.sqrt(2 / (9 * degrees))) ** 3


def filtered(probabilities: Any, top_k: int, top_p: float, min_p: float | None) -> Any:
    """Keep the `k` likeliest, of these the fewest that hold `p`, of these the ones near the likeliest; renormalise."""
    order = np.argsort(-probabilities)
    kept = order[: top_k or len(order)]
    mass = np.cumsum(probabilities[kept]) / probabilities[kept].sum()
    kept = kept[: int(np.searchsorted(mass, top_p - 1e-12)) + 1]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    if min_p is not None:
        result[result < min_p * result.max()] = 0
    return result / result.sum()


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"temperature": 2},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 6, "top_p": 0.8},
    ],
    ids=str,
)
def test_samples_follow_the_softmax_of_logits_over_temperature(make_args: MakeArgs, how: dict[str, Any]) -> None:
    """Chi-square over the 10 tokens of a tiny vocabulary, of 4000 second tokens given the likeliest first one."""
    num_samples = 4000
    policy = tiny_policy(vocab_size=10, hidden_size=16, num_hidden_layers=1)
    given = Prompts(torch.full((num_samples, 1), 5), torch.ones(num_samples, 1, dtype=torch.bool), {})
    config = sampling_config(make_args(response_length=2, **how), stop_token_id=None)
    sampled = sample(policy, given, config, rows_per_call=num_samples, seed=1).tolist()
    first = Counter(row[0] for row in sampled).most_common(1)[0][0]
    counts = np.bincount([row[1] for row in sampled if row[0] == first], minlength=10)

    probabilities = np.exp(oracles.log_softmax(oracles.logits_after(policy, [5, first]) / how["temperature"]))
    expected = filtered(probabilities, how.get("top_k", 0), how.get("top_p", 1.0), how.get("min_p")) * counts.sum()

    possible = expected > 0
    assert not counts[~possible].any()
    assert counts.sum() > 500 and possible.sum() >= 2
    tested = expected >= 5  # rarer tokens are one class
    observed = np.append(counts[tested], counts[possible & ~tested].sum())
    predicted = np.append(expected[tested], expected[possible & ~tested].sum())
    observed, predicted = observed[predicted > 0], predicted[predicted > 0]
    statistic = ((observed - predicted) ** 2 / predicted).sum()
    assert statistic < chi_square_quantile(len(observed) - 1, FALSE_ALARM)


# ---- Calls ----


@pytest.mark.parametrize(
    ("lengths", "most", "equal", "sizes"),
    [
        ([3, 3, 3], 2, False, [2, 1]),
        ([3, 3, 3], 64, False, [3]),
        ([18, 2, 2, 2], 64, False, [2, 2]),  # with two new tokens 3 x 20 positions would hold 20 + 4 + 4 tokens
        ([4, 4, 2], 64, True, [2, 1]),
    ],
)
def test_at_most_half_of_the_positions_of_a_call_are_padding(
    lengths: list[int], most: int, equal: bool, sizes: list[int]
) -> None:
    assert call_sizes(lengths, 2, most, equal) == sizes


def test_a_call_has_no_more_rows_than_allowed(make_args: MakeArgs) -> None:
    policy, rows = tiny_policy(), []
    looked_at(policy)  # before the hook
    policy.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    given = prompts(*[[3 + number] * 4 for number in range(5)])
    sample(policy, given, greedy_config(make_args(response_length=2), stop_token_id=None), rows_per_call=2)
    assert rows == [2, 2, 2, 2, 1, 1]
