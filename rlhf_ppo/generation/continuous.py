"""Generation with transformers' continuous batching: a new prompt takes the place of each finished row."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from rlhf_ppo.data.rollout import Prompts, selected
from rlhf_ppo.generation.protocol import NonFiniteLogitsError, Sampled, stack_rows
from rlhf_ppo.generation.sampling import length_and_filling
from rlhf_ppo.models.heads import Float32Linear, float32_head_apart
from rlhf_ppo.models.packing import unpacked
from rlhf_ppo.models.unwrapping import (
    default_generation_config,
    in_eval_mode,
    lent_type,
    replaced,
    text_config,
    transformers_model,
)
from rlhf_ppo.ranks.random_streams import preserve_rng

if TYPE_CHECKING:
    from transformers.generation.continuous_batching import ContinuousMixin
    from transformers.generation.continuous_batching.requests import GenerationOutput

_MAX_PREFILL_TOKENS = 512
"""Prompt tokens of a forward pass; longer prompts take several. The attention mask grows with it."""

_LOGGER = "ContinuousBatchingLogger"
"""Name of the logger with which transformers reports an error of its thread."""

_PAGE_SIZE = 16
"""Tokens of a page of the cache; the rest of a row's last page is wasted."""


@dataclass(frozen=True)
class ContinuousEngine:
    """transformers' continuous batching, on the policy's own weights.

    Attributes:
        max_rows: Number of rows that run at a time, for which the cache has space.
        dtype: Type of weights, arithmetic and cache; None: the policy's types.
    """

    max_rows: int
    dtype: torch.dtype | None = None
    reads_sharded: bool = False
    called: str = "generation_engine='continuous'"

    @torch.no_grad()
    def sample(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Sampled:
        """Generate a response to each prompt, in a thread that autocast does not reach.

        The order of rows follows from the prompts and the sampled lengths: the same state of the random number
        generator gives the same responses.

        Args:
            policy: A causal language model, or a `PeftModel` around one.
            prompts: `B` left-padded prompts; ids under the mask are ignored.
            config: The sampling distribution, the stop token and the length limit.

        Returns:
            The responses and their log-probabilities.

        Raises:
            NonFiniteLogitsError: There are logits that are NaN or infinite.
            RuntimeError: A response is missing or incomplete.
        """
        rows = selected(prompts.input_ids, prompts.attention_mask)
        config = copy.deepcopy(config)
        max_new_tokens, filling = length_and_filling(config)
        if config.eos_token_id is None:
            config.eos_token_id = -1  # no token: transformers would warn about None and set this
        with (
            in_eval_mode(policy),
            default_generation_config(policy) as model,
            unpacked(model),
            float32_head_apart(policy),
            stored_as(self.dtype, policy),
        ):
            outputs = _run(model, rows, config, cache_for(rows, max_new_tokens, self.max_rows, text_config(policy)))
        return stack_rows(
            [output.generated_tokens for output in outputs],
            [output.logprobs for output in outputs],
            filling=filling,
            device=prompts.input_ids.device,
        )

    @torch.no_grad()
    def check(self, policy: nn.Module) -> None:
        """Generate three tokens for two prompts, and compare with passes over each row alone.

        transformers does not say which models its continuous batching can run; some mix the rows of a pass.

        Args:
            policy: A causal language model, or a `PeftModel` around one.

        Raises:
            ValueError: It fails, or its log-probabilities differ.
        """
        prompt_ids = [
            [token % text_config(policy).vocab_size for token in row] for row in ([1, 9, 3, 8, 5, 7], [4, 6])
        ]
        prompts = Prompts.of_rows(prompt_ids, 0, next(policy.parameters()).device)
        tolerance = 2e-2 if (self.dtype or next(policy.parameters()).dtype).itemsize == 2 else 1e-3
        config, log = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0), logging.getLogger(_LOGGER)
        try:
            with replaced(log, disabled=True), preserve_rng():
                sampled = self.sample(policy, prompts, config)
            rows = zip(prompt_ids, sampled.ids, sampled.logprobs, strict=True)  # pyright: ignore[reportArgumentType]
            error = max(self._deviation(policy, *row) for row in rows)
            fault = "its log-probabilities differ from those of each row alone" if error > tolerance else None
        except NonFiniteLogitsError:  # reported at the first sampling
            fault = None
        except Exception as failure:
            fault = str(failure).splitlines()[0]
        if fault is not None:
            name = type(transformers_model(policy)).__name__
            raise ValueError(
                f"generation_engine='continuous' cannot run a {name}: {fault:.200}; set "
                "generation_engine='transformers'"
            )

    def _deviation(self, policy: nn.Module, prompt: list[int], new: Tensor, logprobs: Tensor) -> float:
        """Return by how much log-probabilities differ from those of the row alone, relative to the largest logit."""
        model: Any = transformers_model(policy)
        with in_eval_mode(policy), unpacked(model), stored_as(self.dtype, policy):
            ids = torch.cat((new.new_tensor(prompt), new))
            logits = model(input_ids=ids[None], use_cache=False).logits[0, -len(new) - 1 : -1].float()
        differences = logits.log_softmax(-1).gather(1, new[:, None])[:, 0] - logprobs
        return float(differences.abs().max() / logits.abs().max().clamp(min=1))

    def policy_changed(self) -> None:
        """Do nothing: the policy itself generates."""


@contextmanager
def stored_as(dtype: torch.dtype | None, model: nn.Module) -> Iterator[None]:
    """Store a model's floating-point parameters in another type inside a context; restore them after it.

    Buffers keep their type, as rotary frequencies are exact, and so does a head that multiplies in float32.

    Args:
        dtype: The type, or None for the parameters' own.
        model: The model.
    """
    heads = [layer for layer in model.modules() if isinstance(layer, Float32Linear)]
    kept = {id(value) for layer in heads for value in layer.parameters(recurse=False)}
    others = [
        value
        for value in model.parameters()
        if value.is_floating_point() and value.dtype != dtype and id(value) not in kept
    ]
    with lent_type(others, dtype):
        yield


def cache_for(
    rows: Sequence[Sequence[int]], max_new_tokens: int, max_rows: int, config: PreTrainedConfig
) -> ContinuousBatchingConfig:
    """Size the paged cache for a batch; transformers would take most of the free memory.

    Each kind of attention layers (full, sliding) takes pages in sectors. A sector has as many pages as the least
    common multiple of the kinds' numbers of layers. The cache has one spare sector for each kind.

    Args:
        rows: The prompts' ids.
        max_new_tokens: Longest response, in tokens.
        max_rows: Number of rows that run at a time.
        config: The language model's configuration.

    Returns:
        A configuration whose cache holds the `max_rows` longest rows, each with the longest response.
    """
    num_rows = min(len(rows), max_rows)
    longest = sorted((len(row) + max_new_tokens for row in rows), reverse=True)[:num_rows]
    num_layers = Counter(getattr(config, "layer_types", None)).values()
    sector = math.lcm(*num_layers)
    rounding = math.ceil(len(num_layers) * sector / sum(num_layers)) if len(num_layers) > 1 else 0
    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    page_size: Any = {"page_size" if "page_size" in names else "block_size": _PAGE_SIZE}  # renamed after 5.17
    return ContinuousBatchingConfig(
        **page_size,
        num_blocks=sum(math.ceil(length / _PAGE_SIZE) for length in longest) + rounding,
        max_batch_tokens=max(num_rows, min(sum(len(row) for row in rows), _MAX_PREFILL_TOKENS)),
        max_requests_per_batch=num_rows,
        safety_margin=0.0,  # there is room for all rows that run together
        use_async_batching=False,
        use_cuda_graph=False,
        disable_nccl_graph_mixing=False,  # or it sets an environment variable for graphs that are not used
        return_logprobs=True,
    )


def _run(
    model: ContinuousMixin, rows: list[list[int]], config: GenerationConfig, cache: ContinuousBatchingConfig
) -> list[Any]:
    """Return the output of each row, in order."""
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=cache)
    try:
        # Add all rows before the thread starts: it would otherwise batch those that happen to have arrived.
        names = manager.add_requests(rows, max_new_tokens=config.max_new_tokens)
        manager.start()
        outputs: dict[str, Any] = {}
        while len(outputs) < len(rows):
            is_running = manager.is_running()  # before reading, so that its last results are read too
            output = manager.get_result(timeout=1)
            if output is not None:
                outputs[output.request_id] = output
            elif not is_running:
                break
    finally:
        manager.stop(block=True)
        manager.destroy()
    for row, name in enumerate(names):
        _check(row, outputs.get(name))
    return [outputs[name] for name in names]


def _check(row: int, output: GenerationOutput | None) -> None:
    values = [] if output is None else output.logprobs
    if not all(map(math.isfinite, values)) or "`nan`" in str(getattr(output, "error", None)):
        raise NonFiniteLogitsError(f"its logits are NaN or infinite for prompt {row} of the batch")
    if output is None or output.error is not None or len(output.generated_tokens) != len(output.logprobs):
        reason = "its thread ended" if output is None else output.error
        raise RuntimeError(f"continuous batching gave no complete response to prompt {row} of the batch: {reason}")
