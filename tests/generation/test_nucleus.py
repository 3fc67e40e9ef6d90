"""`top_p` where every run must have the same bits: integers are added up, and the same tokens stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, TopPLogitsWarper

from rlhf_ppo import PPOTrainer
from rlhf_ppo.generation import dropping
from rlhf_ppo.generation.inversion import sampling_processors
from rlhf_ppo.generation.nucleus import NucleusInIntegers
from tests.conftest import tiny_policy
from tests.runs import QUICK

aten = torch.ops.aten
CUDA = torch.device("cuda")
RAISES = (aten.histc, aten.kthvalue, aten.median, aten.nanmedian, aten.nll_loss2d_forward, aten.put_, aten.put)


class DeterministicCUDA(TorchDispatchMode):
    """Raises where a GPU does under `torch.use_deterministic_algorithms(True)`, by its documentation."""

    num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        sums_floats = packet in (aten.cumsum, aten.cumsum_) and args[0].is_floating_point()
        weighs = packet is aten.bincount and (args[1:] or kwargs.get("weights")) not in ((), (None,), None)
        if torch.are_deterministic_algorithms_enabled() and (sums_floats or weighs or packet in RAISES):
            raise RuntimeError(f"{func} does not have a deterministic implementation")
        self.num_operations += 1
        return func(*args, **kwargs)


@pytest.fixture
def deterministic(determinism_restored: None) -> None:
    torch.use_deterministic_algorithms(True)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
def test_what_stays_is_what_transformers_keeps(top_p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(64, 500, generator=generator)
    logits[:, 300:] = -torch.inf  # as `top_k` leaves them
    theirs: Any = TopPLogitsWarper(top_p)
    assert torch.equal(NucleusInIntegers(top_p)(None, logits), theirs(None, logits))


def test_by_hand() -> None:
    """Probabilities 1/8, 1/2, 1/8, 1/4: of equal ones those in front go first, and the likeliest stays in any case."""
    logits, gone = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log(), -torch.inf
    for top_p, expected in {0.9: [1, 1, 1, 1], 0.875: [0, 1, 1, 1], 0.75: [0, 1, 0, 1], 0.5: [0, 1, 0, 0]}.items():
        kept = NucleusInIntegers(top_p)(None, logits)
        assert torch.equal(kept, logits.masked_fill(torch.tensor([expected]) == 0, gone)), top_p
    assert NucleusInIntegers(1e-9)(None, logits).isfinite().tolist() == [[False, True, False, False]]


@pytest.mark.usefixtures("deterministic")
def test_generate_draws_from_the_same_tokens_in_the_same_order_of_processors() -> None:
    config = GenerationConfig(do_sample=True, temperature=1.7, top_k=5, top_p=0.8, min_p=0.1)
    model: Any = tiny_policy()
    ids: Any = torch.ones(1, 1, dtype=torch.long)
    expected = model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    plain, ours = sampling_processors(config, CUDA)
    assert plain.do_sample and config.top_p == 0.8
    logits = 3 * torch.randn(32, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours(ids, logits.clone()), expected(ids, logits.clone()))
    assert not model._get_logits_processor(plain, input_ids_seq_length=1, device="cpu")


@pytest.mark.usefixtures("deterministic")
def test_without_top_p_generate_is_left_to_itself() -> None:
    config = GenerationConfig(do_sample=True, top_k=5, top_p=1.0)
    assert sampling_processors(config, CUDA) == (config, [])


@pytest.mark.usefixtures("determinism_restored")
def test_an_update_runs_nothing_that_a_gpu_refuses(
    make_trainer: Callable[..., PPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sampling options, penalties, whitening and learning; responses are drawn as on a GPU."""
    monkeypatch.setattr(dropping, "sampling_processors", lambda config, device: sampling_processors(config, CUDA))
    options = {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "whiten_rewards": True, "bootstrap_truncated": True}
    trainer = make_trainer(**QUICK | {"total_episodes": 2}, full_determinism=True, **options)
    with DeterministicCUDA() as mode:
        trainer.train()
    assert trainer.state.global_step == 1 and mode.num_operations > 1000


def test_the_likeliest_stays_however_little_is_to_stay() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 3.5]])
    kept = NucleusInIntegers(0.0)(None, scores).isfinite()
    assert kept.tolist() == [[False, True, False], [False, False, True]]
