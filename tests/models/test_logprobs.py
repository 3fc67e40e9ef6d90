"""Response log-probabilities of many architectures against their own logits, and how much memory they need."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_ppo.models import policy_and_value
from rlhf_ppo.models.capabilities import check_consistent
from rlhf_ppo.models.policy_and_value import response_logprobs
from tests.conftest import count_w4, tiny_policy, tiny_scorer
from tests.models import architectures
from tests.runs import MakeTrainer

SCALED: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
}
"""Architectures that change the logits after the head, and how."""
PLAIN = "llama gpt2 gpt_neox bloom falcon gemma qwen2 qwen3 mistral mixtral phi phi3 olmo2 stablelm smollm3".split()
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN},
    **SCALED,
    "llama tied": {"tie_word_embeddings": True},
    "falcon alibi": {"alibi": True},
    "opt": {"word_embed_proj_dim": 8},
}
"""Changes of a tiny configuration by name, which begins with the family."""


def tiny_model(name: str) -> Any:
    """A random model whose biases and norms are random too, in eval mode."""
    model = architectures.tiny_model(name.split()[0], **ARCHITECTURES[name])
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def ragged_batch(seed: int = 0, vocab_size: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with prompts of 1, 5, 3 tokens padded on the left and responses of 4, 1, 6 padded on the right."""
    prompts, responses = torch.tensor([1, 5, 3]), torch.tensor([4, 1, 6])
    ids = torch.randint(vocab_size, (3, 11), generator=torch.Generator().manual_seed(seed))
    prompt_mask = torch.arange(5) >= 5 - prompts[:, None]
    response_mask = torch.arange(6) < responses[:, None]
    return ids, torch.cat((prompt_mask, response_mask), dim=1), response_mask


def own_logprobs(model: Any, ids: Tensor, attention_mask: Tensor, response_mask: Tensor, temperature: float) -> Any:
    """Log-probabilities and entropies from the model's own logits, one unpadded row at a time, in float64."""
    results: tuple[list[Any], list[Any]] = ([], [])
    for row, real, answer in zip(ids, attention_mask, response_mask, strict=True):
        tokens, length = row[real], int(answer.sum())
        with torch.no_grad():
            distribution = (model(input_ids=tokens[None]).logits[0].double() / temperature).log_softmax(-1).numpy()
        for position in range(len(tokens) - length, len(tokens)):
            before = distribution[position - 1]
            results[0].append(before[tokens[position]])
            results[1].append(-(np.exp(before) * before).sum())
    return np.array(results[0]), np.array(results[1])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_and_entropy_are_those_of_the_models_own_logits(name: str) -> None:
    model, (ids, attention_mask, response_mask) = tiny_model(name), ragged_batch()
    check_consistent(model, "model")
    with torch.no_grad():
        ours = response_logprobs(model, ids, attention_mask, response_mask, temperature=0.7)
    expected = own_logprobs(model, ids, attention_mask, response_mask, temperature=0.7)
    assert expected[0].std() > 0.3, "the logits are all but constant, so the test would not see a wrong index"
    for values, exact in zip(ours, expected, strict=True):
        assert values.dtype == torch.float32
        assert_allclose(values[response_mask], exact, rtol=1e-5, atol=2e-5)
        assert not values[~response_mask].any()


@pytest.mark.parametrize("is_called", [False, True])
def test_without_entropy_the_logprobs_are_the_same(is_called: bool) -> None:
    model, (ids, attention_mask, response_mask) = tiny_policy(), ragged_batch()
    read = response_logprobs(model, ids, attention_mask, response_mask, 0.7)
    if is_called:
        model.lm_head.register_forward_hook(lambda *_: None)
    expected = response_logprobs(model, ids, attention_mask, response_mask, 0.7)
    torch.testing.assert_close(expected, read)
    ours = response_logprobs(model, ids, attention_mask, response_mask, 0.7, with_entropy=False)
    assert torch.equal(ours.logprobs, expected.logprobs) and expected.entropy.isfinite().all()
    assert ours.entropy[response_mask].isnan().all() and not ours.entropy[~response_mask].any()


def test_impossible_tokens_have_entropy_without_nan() -> None:
    """A model may forbid tokens with a logit of -inf."""
    model, (ids, attention_mask, response_mask) = tiny_policy(), ragged_batch()
    bias = torch.zeros(32)
    bias[5:] = -torch.inf
    model.lm_head.bias = torch.nn.Parameter(bias)
    ids = ids % 5
    ours = response_logprobs(model, ids, attention_mask, response_mask, 1.0)
    _, entropy = own_logprobs(tiny_policy(), ids, attention_mask, response_mask, 1.0)
    assert ours.logprobs.isfinite().all() and ours.entropy.isfinite().all()
    assert ours.entropy.max() <= np.log(5) + 1e-6 < entropy.max()

    total: Any = 0.0  # of a softmax over the five that remain
    for row, real, answer in zip(ids, attention_mask, response_mask, strict=True):
        tokens, length = row[real], int(answer.sum())
        logprobs = model(input_ids=tokens[None]).logits[0, -length - 1 : -1, :5].log_softmax(-1)
        total = total + logprobs.gather(1, tokens[-length:, None]).sum() - (logprobs.exp() * logprobs).sum()
    (expected,) = torch.autograd.grad(total, model.lm_head.weight)
    read = (ours.logprobs + ours.entropy)[response_mask].sum()
    (found,) = torch.autograd.grad(read, model.lm_head.weight)
    torch.testing.assert_close(read, total)
    torch.testing.assert_close(found, expected)


# ---- Chunks ----


class LargestOutput(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel() > self.numel:
                self.numel, self.operation = leaf.numel(), f"{func} {tuple(leaf.shape)}"
        return result


def test_no_tensor_of_batch_time_and_vocabulary_in_rollout_or_learning(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is `B T V` of one micro-batch; parameters and one step's logits `(B, V)` are below it."""
    vocabulary, rows, response_length, chunk = 512, 8, 16, 8
    config = {"vocab_size": vocabulary, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    monkeypatch.setattr(policy_and_value, "MAX_CHUNK_ELEMENTS", chunk * vocabulary)

    def train() -> LargestOutput:
        trainer = make_trainer(
            model=tiny_policy(**config),
            value_model=tiny_scorer(seed=2, **config),
            reward_funcs=count_w4,
            response_length=response_length,
            stop_token=None,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            num_mini_batches=1,
            total_episodes=rows,
        )
        with LargestOutput() as largest:
            trainer.train()
        return largest

    largest = train()
    assert largest.numel < rows * response_length * vocabulary / 4, largest.operation
    assert largest.numel >= chunk * vocabulary, "the recorder saw no logits"
    monkeypatch.undo()
    assert train().numel >= rows * response_length * vocabulary, "in one chunk the recorder sees the whole"
