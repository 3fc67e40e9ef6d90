"""Forward passes of policy, value model and reference: log-probabilities, entropies and values of response tokens.

A backbone runs once; the language-model head is applied to the response's real tokens only, a chunk of tokens at a
time, so that no `(batch, time, vocabulary)` tensor exists. While training, the logits of all chunks but the last are
recomputed in the backward pass instead of kept. Both models are one module, so that one `prepare`, one optimizer and
one backward serve both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from rlhf_ppo.data.rollout import PackedIndices
from rlhf_ppo.models.adapters import trained_weights_kept
from rlhf_ppo.models.frozen import Frozen
from rlhf_ppo.models.fused import HeadFactors, LogitScaling, fused_logprobs
from rlhf_ppo.models.heads import (
    LINEAR_KINDS,
    ValueHead,
    is_in_float32,
    last_real,
    multiply_scores_in_float32,
    token_values,
)
from rlhf_ppo.models.packing import hidden_states, packs_rows, shares_prefixes
from rlhf_ppo.models.unwrapping import (
    backbone,
    is_managed,
    is_zero_hook,
    no_split_modules,
    output_layer,
    recompute_in_eval_mode,
    set_learning,
    text_config,
    transformers_model,
    with_adapters,
)

if TYPE_CHECKING:
    from peft.utils import ModulesToSaveWrapper

MAX_CHUNK_ELEMENTS, MAX_CHUNK_ELEMENTS_ON_GPU = 2**24, 2**27
"""Logits computed at once, tokens x vocabulary: 64 and 512 MiB in float32. The fewer they are, the more often hidden
states and their gradients are read and written, with few tokens the head's weight and its gradient too."""


class ResponseLogprobs(NamedTuple):
    """Output of the policy for the tokens of a response.

    Attributes:
        logprobs: Log-probability of each response token, nats, float32 `(B, T)`, 0 outside the mask.
        entropy: Entropy of the next-token distribution, nats, float32 `(B, T)`, 0 outside the mask; NaN inside it if
            the entropy was not computed.
    """

    logprobs: Tensor
    entropy: Tensor


def response_logprobs(
    policy: nn.Module,
    query_responses: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    temperature: float,
    with_entropy: bool = True,
    places: PackedIndices | None = None,
    states: Tensor | None = None,
) -> ResponseLogprobs:
    r"""Compute `log softmax(z_t / temperature)[y_t]` for every response token that the policy wrote.

    PPO's ratio compares the sampled distributions, and uses the sampling temperature (N+ Implementation Details, arXiv
    2403.17031, section 3.1). Top-k and top-p are not applied: both sides of the ratio are full distributions.

    Args:
        policy: A causal language model, or a `PeftModel` around one.
        query_responses: Token ids, long `(B, C + T)`.
        attention_mask: True on real tokens, bool `(B, C + T)`.
        response_mask: True on the response tokens that the policy wrote, bool `(B, T)`.
        temperature: Sampling temperature, above 0.
        with_entropy: Compute the entropy.
        places: Indices of the real tokens; None reads them from the device.
        states: Hidden states of all positions, `(B, C + T, H)`; None runs the policy's body.

    Returns:
        Log-probabilities and entropy, both float32 `(B, T)`.
    """
    num_rows, length = response_mask.shape
    places = PackedIndices.of(query_responses, attention_mask, response_mask) if places is None else places
    tokens = places.response_tokens
    states = hidden_states(policy, query_responses, attention_mask, places) if states is None else states
    states = states.flatten(0, 1).index_select(0, tokens - 1)
    per_token = token_logprobs(policy, states, query_responses.flatten()[tokens], temperature, with_entropy)
    zeros = torch.zeros(num_rows * length, device=states.device)
    of_rows = (zeros.index_copy(0, places.responses, column).view(num_rows, length) for column in per_token)
    return ResponseLogprobs(*(column.clone() for column in of_rows))  # FSDP2 warns of outputs that are views


def token_logprobs(
    policy: nn.Module, states: Tensor, targets: Tensor, temperature: float, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Apply the head to `N` hidden states, chunk by chunk.

    Args:
        policy: The model whose head reads the states.
        states: Hidden states before each token `(N, H)`.
        targets: The tokens that followed, long `(N,)`.
        temperature: Sampling temperature.
        with_entropy: Compute the entropies, otherwise NaN.

    Returns:
        Log-probabilities and entropies in nats, float32 `(N,)` each.
    """
    states = _head_states(policy, states)
    head = head_layers(output_layer(policy), states)
    if head is None:
        return _logprobs_of_called_head(policy, states, targets, temperature, with_entropy)
    scaling = logit_scaling(policy, temperature)
    return head.apply(
        lambda factors: fused_logprobs(factors, targets, scaling, max_chunk_elements(states), with_entropy)
    )


def max_chunk_elements(states: Tensor) -> int:
    """Return the number of logits to compute at once on the device of the states."""
    return MAX_CHUNK_ELEMENTS_ON_GPU if states.device.type == "cuda" else MAX_CHUNK_ELEMENTS


def _logprobs_of_called_head(
    policy: nn.Module, states: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Like `token_logprobs`, for a head whose layers cannot be read; autograd computes the gradients."""
    chunk = max(1, max_chunk_elements(states) // text_config(policy).vocab_size)
    num_chunks = _same_on_all_ranks(policy, math.ceil(len(states) / chunk))
    recompute = torch.is_grad_enabled() and num_chunks > 1

    def one_chunk(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_distribution = (_scaled_logits(policy, states) / temperature).log_softmax(dim=-1)
        logprobs = log_distribution.gather(1, targets[:, None]).squeeze(1)
        if not with_entropy:
            return logprobs, torch.full_like(logprobs, math.nan)
        finite = log_distribution.clamp(min=torch.finfo(torch.float32).min)  # a forbidden token has -inf
        return logprobs, -(log_distribution.exp() * finite).sum(dim=-1)

    parts = [
        checkpoint(one_chunk, *part, use_reentrant=False) if recompute else one_chunk(*part)
        for part in zip(states.tensor_split(num_chunks), targets.tensor_split(num_chunks), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _same_on_all_ranks(policy: nn.Module, num_chunks: int) -> int:
    """Return the largest number of chunks of all ranks under ZeRO-3, where each call of a head takes all ranks."""
    if not is_managed(policy):
        return num_chunks
    largest = torch.tensor(num_chunks, device=next(policy.parameters()).device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return int(largest)


def logits(policy: nn.Module, states: Tensor) -> Tensor:
    """Apply the language-model head and the scalings that some architectures apply to its output.

    Args:
        policy: The model whose head reads the states.
        states: Hidden states `(..., H)`.

    Returns:
        Logits before the temperature, float32 `(..., V)`.
    """
    return _scaled_logits(policy, _head_states(policy, states))


def _head_states(policy: nn.Module, states: Tensor) -> Tensor:
    """Return what the head reads: hidden states, or the output of ModernBERT's layer between backbone and head."""
    head = output_layer(policy)
    layer = getattr(transformers_model(policy), "lm_head", head)
    return states if head in layer.modules() else layer(states)


def _scaled_logits(policy: nn.Module, states: Tensor) -> Tensor:
    result = output_layer(policy)(states).float()
    factor, cap, _ = logit_scaling(policy)
    return result * factor if cap is None else cap * torch.tanh(result * factor / cap)


def logit_scaling(policy: nn.Module, temperature: float = 1.0) -> LogitScaling:
    """Read the scaling of the logits from the configuration.

    Args:
        policy: The model.
        temperature: Sampling temperature.
    """
    config = text_config(policy)
    factor = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        factor *= getattr(config, name, None) or 1.0
    for name in ("logits_scaling", "logits_mup_width_multiplier"):
        factor /= getattr(config, name, None) or 1.0
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    cap = next((cap for name in names if (cap := getattr(config, name, None))), None)
    return LogitScaling(factor, cap, temperature)


# ---- Linear layers of the head ----

T = TypeVar("T")


class HeadLayers(NamedTuple):
    """Linear layers of a head: `logits = sum_i layer_i(states_i)`; only the first may have a bias.

    Attributes:
        states: The hidden states `(N, H)`, and for each adapter its inner activations `(N, r)`.
        layers: The head's own layer, and for each adapter its outer one.
    """

    states: tuple[Tensor, ...]
    layers: tuple[nn.Linear, ...]

    def apply(self, function: Callable[[HeadFactors], T]) -> T:
        """Call a function with the factors, inside a forward pass of each layer.

        ZeRO-3's hooks then gather each weight once before the function and once before its backward pass.

        Args:
            function: Returns a tensor or a tuple of tensors, which are differentiable.
        """

        def run(*states: Tensor) -> T:
            weights = tuple(layer.weight for layer in self.layers)
            return function(HeadFactors(states, weights, self.layers[0].bias, is_in_float32(self.layers[0])))

        for layer in self.layers:
            run = _within_pass_of(layer, run)
        return run(*self.states)


def head_layers(head: nn.Module, states: Tensor) -> HeadLayers | None:
    """Return the layers of a head that is a linear layer with at most plain LoRA adapters.

    Args:
        head: The language-model head.
        states: Its hidden states `(N, H)`.

    Returns:
        The layers; None for any other head, which must be called: quantized, DoRA, sharded by a backend other than
        ZeRO-3, or with hooks that may read or change its output.
    """
    if type(head).__module__.startswith("peft."):
        from peft.tuners.lora import Linear
        from peft.utils import ModulesToSaveWrapper

        if isinstance(head, ModulesToSaveWrapper):
            return head_layers(_active_copy(head), states)
        if type(head) is Linear:
            return _lora_layers(head, states)
    # Not `head.weight`, which ZeRO-3 would gather for the rest of the model's forward pass.
    weight = next(head.parameters(recurse=False), None)
    if not isinstance(head, nn.Linear) or type(head) not in LINEAR_KINDS:
        return None
    if _is_observed(head) or isinstance(weight, DTensor):
        return None
    return HeadLayers((states,), (head,))


def _within_pass_of(layer: nn.Module, function: Callable[..., T]) -> Callable[..., T]:
    """Let a layer with hooks run a function in place of its forward pass, on the same inputs."""

    def run(*states: Tensor) -> T:
        layer.forward = function
        try:
            return layer(*states)
        finally:
            del layer.forward

    return run if layer._forward_pre_hooks else function


def _is_observed(head: nn.Module) -> bool:
    """Return whether a head has hooks, other than ZeRO-3's, or another `forward`."""
    hooks = (*head._forward_pre_hooks.values(), *head._forward_hooks.values())
    return not all(map(is_zero_hook, hooks)) or "forward" in vars(head)


def _active_copy(wrapper: ModulesToSaveWrapper) -> nn.Module:
    active = [] if wrapper.disable_adapters else [name for name in wrapper.active_adapters if name]
    is_copied = bool(active) and active[0] in wrapper.modules_to_save
    return wrapper.modules_to_save[active[0]] if is_copied else wrapper.original_module


def _lora_layers(head: Any, states: Tensor) -> HeadLayers | None:
    base = head_layers(head.base_layer, states)
    if base is None or (head.disable_adapters and head.merged):
        return None
    active = [] if head.disable_adapters or head.merged else [n for n in head.active_adapters if n in head.lora_A]
    if any(name in head.lora_variant or head.lora_B[name].bias is not None for name in active):
        return None
    inner = [
        head.lora_A[name](head.lora_dropout[name](states.to(next(head.lora_A[name].parameters()).dtype)))
        * head.scaling[name]
        for name in active
    ]
    return HeadLayers((*base.states, *inner), (*base.layers, *(head.lora_B[name] for name in active)))


class PolicyAndValueOutput(NamedTuple):
    """One forward pass of both models over a response.

    Attributes:
        logprobs: Log-probabilities of the response tokens, nats, float32 `(B, T)`, 0 outside the mask.
        entropy: Entropy of the next-token distributions, nats, float32 `(B, T)`, 0 outside the mask; NaN inside it if
            the entropy was not computed.
        values: Value estimate before each response token, float32 `(B, T)`, 0 outside the mask.
        final_values: Value estimate after the last token of the row, whoever wrote it, float32 `(B,)`.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    final_values: Tensor


class ResponseValues(NamedTuple):
    """Output of the value model for a response.

    Attributes:
        values: Value estimate before each response token, float32 `(B, T)`, 0 outside the mask.
        final_values: Value estimate after the last token of the row, whoever wrote it, float32 `(B,)`.
    """

    values: Tensor
    final_values: Tensor


class PolicyAndValue(nn.Module):
    """The two trained models; rollout and optimizer steps call the same `forward`.

    Args:
        policy: The causal language model that is trained, or a `PeftModel` around it.
        value_model: A model with a per-token scalar head, or the `ValueHead` of the policy: one body then serves both.
        temperature: Sampling temperature that divides the logits.
    """

    _keys_to_ignore_on_save = None
    supports_gradient_checkpointing = True

    def __init__(self, policy: nn.Module, value_model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.policy = policy
        self.value_model = value_model
        multiply_scores_in_float32(value_model)
        self.temperature = temperature
        self.generation_config = getattr(transformers_model(policy), "generation_config", None)
        self.given_eos = getattr(self.generation_config, "eos_token_id", None)
        self.register_load_state_dict_post_hook(_allow_missing_frozen)

    @property
    def config(self) -> PreTrainedConfig:
        """The policy's configuration; Trainer and its integrations read it."""
        return transformers_model(self.policy).config

    @property
    def _with_body(self) -> list[nn.Module]:
        return [self.policy] if isinstance(self.value_model, ValueHead) else [self.policy, self.value_model]

    @property
    def _no_split_modules(self) -> list[str]:
        return no_split_modules(*self._with_body)

    @property
    def device(self) -> torch.device:
        """Device of the policy's parameters."""
        return next(self.policy.parameters()).device

    @property
    def packs_rows(self) -> bool:
        """Whether both models pack rows: they compute nothing for padding."""
        return all(packs_rows(backbone(model)) for model in self._with_body)

    @property
    def shares_prefixes(self) -> bool:
        """Whether both models compute a beginning that several rows share only once."""
        return all(shares_prefixes(backbone(model)) for model in self._with_body)

    def train(self, mode: bool = True) -> Self:
        """Switch between learning and evaluation, which compute the same; see `set_learning`."""
        super().train(mode)
        if mode:
            for model in self._with_body:
                set_learning(model)
        return self

    def tie_weights(self) -> None:
        """Tie each model's tied weights again; accelerate calls this after moving models to the meta device."""
        for model in self._with_body:
            transformers_model(model).tie_weights()

    def gradient_checkpointing_enable(self, **kwargs: object) -> None:
        """Recompute activations in the backward pass, in both models."""
        for model in self._with_body:
            transformers_model(model).gradient_checkpointing_enable(**kwargs)
            recompute_in_eval_mode(model)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Recompute activations in the backward pass, in both models (the name since transformers 5.2x)."""
        for model in self._with_body:
            transformers_model(model).activation_checkpointing_enable(**kwargs)
            recompute_in_eval_mode(model)

    def forward(
        self,
        query_responses: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        only: Literal["policy", "value_model"] | None = None,
        with_entropy: bool = True,
        places: PackedIndices | None = None,
        temperature: float | None = None,
    ) -> PolicyAndValueOutput | ResponseLogprobs | ResponseValues:
        """Evaluate both models, or one of them, on responses.

        Args:
            query_responses: Token ids, long `(B, C + T)`.
            attention_mask: True on real tokens, bool `(B, C + T)`.
            response_mask: True on the response tokens that the policy wrote, bool `(B, T)`.
            only: The model to run; None runs both.
            with_entropy: Compute the policy's entropy.
            places: Indices of the real tokens; None reads them from the device, once for each model.
            temperature: Divides the logits; None: the sampling temperature.

        Returns:
            Log-probabilities and entropy of the response tokens, and their values.
        """
        batch, states = (query_responses, attention_mask, response_mask), None
        if isinstance(self.value_model, ValueHead) and only != "policy":
            places = PackedIndices.of(query_responses, attention_mask, response_mask) if places is None else places
            with torch.set_grad_enabled(torch.is_grad_enabled() and only is None):  # the head learns by itself
                states = hidden_states(self.policy, query_responses, attention_mask, places)
        if only == "value_model":
            return response_values(self.value_model, *batch, places, states)
        divisor = self.temperature if temperature is None else temperature
        of_policy = response_logprobs(self.policy, *batch, divisor, with_entropy, places, states)
        if only == "policy":
            return of_policy
        states = None if states is None else states.detach()
        return PolicyAndValueOutput(*of_policy, *response_values(self.value_model, *batch, places, states))

    def on_policy(self, function: Callable[[nn.Module], T]) -> T:
        """Call `function` with the policy; FSDP registers this method to run the way it runs `forward`."""
        return function(self.policy)


def response_values(
    value_model: nn.Module,
    query_responses: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    places: PackedIndices | None = None,
    states: Tensor | None = None,
) -> ResponseValues:
    """Estimate the value before each response token, and after the last token of the row.

    The last token may be a tool's: its answer is part of the state in which the next turn begins.

    Args:
        value_model: A model with a per-token scalar head.
        query_responses: Token ids, long `(B, C + T)`.
        attention_mask: True on real tokens, bool `(B, C + T)`.
        response_mask: True on the response tokens that the policy wrote, bool `(B, T)`.
        places: Indices of the real tokens; None reads them from the device.
        states: Hidden states of all positions, `(B, C + T, H)`; None runs the value model's body.
    """
    last = response_mask.shape[1] + 1
    values = token_values(value_model, query_responses, attention_mask, last, places, states)
    after_last = last_real(attention_mask[:, -values.shape[1] :])[:, None]
    before = values[:, :-1].masked_fill(~response_mask, 0.0)
    return ResponseValues(before, values.gather(1, after_last).squeeze(1).clone())


def _allow_missing_frozen(model: nn.Module, incompatible: Any) -> None:
    """Let DeepSpeed's checkpoints omit frozen parameters."""
    parameters = model.named_parameters(remove_duplicate=False)  # two models may share a base
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in frozen]


# ---- The reference ----


class FrozenPolicy(Frozen):
    """A language model whose forward pass gives the log-probabilities of responses.

    Args:
        policy: The model; it is frozen.
        temperature: Sampling temperature that divides the logits.
    """

    def __init__(self, policy: nn.Module, temperature: float) -> None:
        super().__init__(policy)
        self.temperature = temperature

    @property
    def policy(self) -> nn.Module:
        """The language model, as `PolicyAndValue` calls its own."""
        return self.model

    def on_policy(self, function: Callable[[nn.Module], T]) -> T:
        """Call `function` with the language model; FSDP registers this method to run the way it runs `forward`."""
        return function(self.model)

    def forward(
        self,
        query_responses: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        places: PackedIndices | None = None,
    ) -> ResponseLogprobs:
        """Evaluate responses, without entropy; shapes as in `response_logprobs`."""
        batch = query_responses, attention_mask, response_mask
        return response_logprobs(self.model, *batch, self.temperature, with_entropy=False, places=places)


class Reference:
    """The policy that the KL penalty compares with (Ziegler et al., arXiv 1909.08593, section 2.1).

    Args:
        model: A separate frozen model, or None if the policy's base weights serve.
        adapter_name: With `model=None`, the adapter that makes the policy the reference; None switches adapters off.
    """

    def __init__(self, model: nn.Module | None, adapter_name: str | None = None) -> None:
        self.model = model
        self.adapter_name = adapter_name

    @property
    def separate_policy(self) -> nn.Module | None:
        """The separate language model; None if the policy's base serves, or a backend holds the model."""
        return self.model.policy if isinstance(self.model, FrozenPolicy) else None

    @contextmanager
    def forward(self, model: nn.Module, policy: nn.Module) -> Iterator[Callable[..., tuple[Tensor, ...]]]:
        """Yield the function that evaluates responses under the reference; shapes as in `response_logprobs`.

        Args:
            model: The prepared `PolicyAndValue`, which runs with the policy's adapters switched.
            policy: The unwrapped policy.
        """
        with self.generating(model, policy) as module:
            yield functools.partial(module, only="policy", with_entropy=False) if module is model else module

    @contextmanager
    def generating(self, model: nn.Module, policy: nn.Module) -> Iterator[nn.Module]:
        """Yield the module whose `policy` is the reference, to generate from; the arguments are those of `forward`."""
        if self.model is None:
            from trl.trainer.utils import use_adapter  # slow to import

            with trained_weights_kept(policy), use_adapter(with_adapters(policy), self.adapter_name):
                yield model
        else:
            with getattr(self.model, "offload", nullcontext)():
                yield self.model
