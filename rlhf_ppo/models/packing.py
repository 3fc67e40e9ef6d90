"""Hidden states of a backbone, over packed or padded rows.

Packed rows are a single sequence of all real tokens, which attention alone separates: embeddings, projections and
feed-forward layers compute nothing for padding. Tokens with which several rows begin are in it once (`PrefixTree`).
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_ppo.data import prefix_tree as prefixes
from rlhf_ppo.data.images import model_inputs, with_spare
from rlhf_ppo.data.prefix_tree import PrefixTree
from rlhf_ppo.data.rollout import PackedIndices
from rlhf_ppo.models.unwrapping import (
    backbone,
    in_eval_mode,
    is_in_16_bits,
    is_sharded,
    rounding,
    text_config,
    transformers_model,
)
from rlhf_ppo.ranks.random_streams import preserve_rng

PACKS, LATER, SHARES = "rows_are_packed", "packs_rows_later", "prefixes_are_shared"
"""Attributes of a backbone: the attention with which it packs rows, whether its first pass calls `pack_rows`, and the
argument of `share_prefixes`."""


@functools.lru_cache(maxsize=32)
def takes(model_class: type, argument: str) -> bool:
    """Return whether a class's forward pass has an argument."""
    return argument in inspect.signature(model_class.forward).parameters  # pyright: ignore


def position_ids(attention_mask: Tensor) -> Tensor:
    """Number the real tokens of each row from 0: `position_t = sum_{s<=t} mask_s - 1`.

    Args:
        attention_mask: True on real tokens, `(B, L)`.

    Returns:
        Positions, long `(B, L)`; 0 on left padding.
    """
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)


def hidden_states(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, places: PackedIndices | None = None
) -> Tensor:
    """Run the backbone once and return its last hidden states.

    Rows are packed where `pack_rows` has found that the model can. Elsewhere rows are padded on the
    right with id 0: a padding id outside the vocabulary, or equal to EOS, changes nothing.

    Args:
        model: Any transformers model with a backbone, or a `PeftModel` around one.
        input_ids: Token ids, long `(B, L)`.
        attention_mask: True on real tokens, bool `(B, L)`.
        places: Indices of these; None reads them from the device.

    Returns:
        Hidden states `(B, L, H)` in the model's dtype, 0 where the mask is False.
    """
    body = backbone(model)
    if vars(body).pop(LATER, False):
        pack_rows(model, now=True)
    places = PackedIndices.of(input_ids, attention_mask) if places is None else places
    if packs_rows(body):
        states = run_packed(body, input_ids, places, places.tree if shares_prefixes(body) else None)
    else:
        states = run_padded(body, input_ids, places)
    scattered = states.new_zeros(attention_mask.numel(), states.shape[-1]).index_copy(0, places.tokens, states)
    return scattered.unflatten(0, attention_mask.shape)


def attention_of(body: nn.Module) -> str | None:
    """Return the name of a backbone's current attention."""
    config = transformers_model(body).config
    return config._attn_implementation


def packs_rows(body: nn.Module) -> bool:
    """Return whether the check has found that a backbone separates packed rows with its current attention."""
    return vars(body).get(PACKS, "") == attention_of(body)


def uses_flash_attention(body: nn.Module) -> bool:
    """Return whether a backbone's attention is flash attention, which runs on accelerators."""
    return str(attention_of(body)).startswith("flash_attention")


def share_prefixes(shares: bool | None, *models: nn.Module | None) -> None:
    """Set whether `hidden_states` computes a beginning that several rows share only once.

    Args:
        shares: `share_prefixes` of the arguments; None: on a CPU.
        models: transformers models with a backbone, or `PeftModel`s around one; None and single heads are left out.
    """
    for model in models:
        if model is not None and hasattr(model, "config"):
            setattr(backbone(model), SHARES, shares)


def shares_prefixes(body: nn.Module) -> bool:
    """Return whether a backbone computes a beginning that several rows share only once."""
    shares = vars(body).get(SHARES)
    on_cpu = next(body.parameters()).device.type == "cpu"
    return packs_rows(body) and attention_of(body) == PACKED and (on_cpu if shares is None else shares)


def run_packed(body: nn.Module, input_ids: Tensor, places: PackedIndices, tree: PrefixTree | None = None) -> Tensor:
    """Return the hidden states of all `N` real tokens, `(N, H)`, from a single sequence.

    Args:
        body: A backbone for which `packs_rows` is true.
        input_ids: Token ids, long `(B, L)`.
        places: Indices of the real tokens.
        tree: The prefix tree of the rows, whose `U` tokens are the sequence; None: all real tokens.
    """
    # A mask of four dimensions keeps transformers from making an unused mask (N, N).
    unused_mask = input_ids.new_ones(1, 1, 1, 1, dtype=torch.bool)
    for_packed_sdpa = {"attention_mask": unused_mask, "squeezed_places": places.squeezed, "prefix_tree": tree}
    tokens, positions = places.tokens, places.positions
    if tree is not None:
        tokens, positions = tokens[tree.tokens], positions[tree.tokens]
    output = body(
        input_ids=input_ids.flatten()[tokens][None],
        position_ids=positions[None],
        cu_seq_lens_q=places.starts,
        cu_seq_lens_k=places.starts,
        max_length_q=places.longest,
        max_length_k=places.longest,
        use_cache=False,
        return_dict=True,
        **({"attention_mask": None} if uses_flash_attention(body) else for_packed_sdpa),
    )
    states = output.last_hidden_state[0]
    return states if tree is None else states.index_select(0, tree.expand)


def run_padded(body: nn.Module, input_ids: Tensor, places: PackedIndices) -> Tensor:
    """Return the hidden states of all `N` real tokens, `(N, H)`, from rows padded to the longest row.

    Args:
        body: Any backbone.
        input_ids: Token ids, long `(B, L)`.
        places: Indices of the real tokens.
    """
    mask = places.squeezed_mask
    inputs = {"input_ids": places.squeeze(input_ids), "attention_mask": mask.long()}
    if places.images is not None:  # models compute the positions of images
        rows, ids, attended = with_spare(places.images, inputs["input_ids"], inputs["attention_mask"])
        inputs = {"input_ids": ids, "attention_mask": attended, **model_inputs(rows, attended)}
    elif takes(type(body), "position_ids"):
        inputs["position_ids"] = position_ids(mask)
    states = body(**inputs, use_cache=False, return_dict=True).last_hidden_state
    if len(states) > len(mask):
        states = states[: len(mask), : places.longest] + 0.0 * states[-1].sum()  # a gradient of 0 for the tower
    return states.flatten(0, 1).index_select(0, places.squeezed)


# ---- Packed attention ----

PACKED = "packed_sdpa"
"""Name of the attention of models with packed rows; all other calls run `sdpa`."""


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    squeezed_places: Tensor | None = None,
    prefix_tree: PrefixTree | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend causally within each row of a packed sequence, with transformers' attention-function signature.

    Args:
        module: The attention layer.
        query: Queries of `N` tokens, `(1, heads, N, D)`.
        key: Keys, `(1, key heads, N, D)`.
        value: Values, as the keys.
        attention_mask: Read only if rows are not packed.
        cu_seq_lens_q: First token of each of `B` rows and end of the last, int32 `(B + 1,)`; None if not packed.
        max_length_q: Tokens of the longest row.
        squeezed_places: Indices of the tokens in rows padded on the right to the longest, long `(N,)`.
        prefix_tree: The tree whose tokens these are, in place of the rows; None: they are all tokens of the rows.
        kwargs: Other arguments of `sdpa_attention_forward`, and `sliding_window`.

    Returns:
        Attended values `(1, N, heads, D)`, and None.
    """
    if cu_seq_lens_q is None or max_length_q is None or squeezed_places is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    attend = functools.partial(_attend, module, **kwargs)
    if prefix_tree is not None:
        return _attend_node_by_node(attend, (query, key, value), prefix_tree), None
    rows = PackedRows(cu_seq_lens_q, max_length_q, squeezed_places)
    attend_rows = _attend_row_by_row if query.device.type == "cpu" else _attend_padded
    return attend_rows(attend, (query, key, value), rows), None


class PackedRows(NamedTuple):
    """Rows of a packed sequence.

    Attributes:
        starts: First token of each of `B` rows and end of the last, int32 `(B + 1,)`.
        longest: Tokens of the longest row.
        squeezed: Indices of the `N` tokens in rows padded to the longest, long `(N,)`.
    """

    starts: Tensor
    longest: int
    squeezed: Tensor


Attend = Callable[[tuple[Tensor, ...]], Tensor]
"""Attends causally; takes queries, keys and values."""


def _attend_row_by_row(attend: Attend, states: tuple[Tensor, Tensor, Tensor], packed: PackedRows) -> Tensor:
    lengths = packed.starts.diff().tolist()
    rows = zip(*(part.split(lengths, dim=2) for part in states), strict=True)
    return torch.cat([attend(row) for row in rows], dim=1)


def _attend_node_by_node(attend: Attend, states: tuple[Tensor, Tensor, Tensor], tree: PrefixTree) -> Tensor:
    """Let the tokens of each node attend to the nodes above it and, causally, to their own."""
    query, key, value = (part.split(tree.lengths, dim=2) for part in states)
    outputs: list[Tensor] = []
    for node, path in enumerate(tree.paths):
        keys, values = (torch.cat([part[above] for above in (*path, node)], dim=2) for part in (key, value))
        outputs.append(attend((query[node], keys, values)))
    return torch.cat(outputs, dim=1)


def _attend_padded(attend: Attend, states: tuple[Tensor, Tensor, Tensor], packed: PackedRows) -> Tensor:
    """Attend in a single call for all rows, padded on the right: causal attention hides the padding."""
    num_rows, longest, places = len(packed.starts) - 1, packed.longest, packed.squeezed

    def pad(part: Tensor) -> Tensor:
        tokens = part[0].transpose(0, 1)
        padded = tokens.new_zeros(num_rows * longest, *tokens.shape[1:]).index_copy(0, places, tokens)
        return padded.unflatten(0, (num_rows, longest)).transpose(1, 2)

    query, key, value = map(pad, states)
    return attend((query, key, value)).flatten(0, 1).index_select(0, places)[None]


def _attend(module: nn.Module, states: tuple[Tensor, ...], sliding_window: int | None = None, **kwargs: Any) -> Tensor:
    """Attend causally; the queries are those of the last keys."""
    query, key, value = states
    length, mask = key.shape[2], None
    above = length - query.shape[2]
    window = length if sliding_window is None else sliding_window
    if above > 0 or length > window:
        positions = torch.arange(length, device=query.device)
        distance = positions[above:, None] - positions
        mask = ((distance >= 0) & (distance < window))[None, None]
    options: dict[str, Any] = kwargs | {"is_causal": True}
    return sdpa_attention_forward(module, query, key, value, mask, **options)[0]


AttentionInterface.register(PACKED, packed_sdpa)
AttentionMaskInterface.register(PACKED, sdpa_mask)


def pack_rows(model: nn.Module, now: bool = False) -> None:
    """Enable packing in `hidden_states` if each row's states are those of the row alone; see `looked_at`.

    A model that ZeRO-3 has sharded cannot run yet: its first pass is checked.

    Args:
        model: A transformers model with a backbone, or a `PeftModel` around one.
        now: The model is in its first pass.
    """
    base, body = transformers_model(model), backbone(model)
    if not may_pack(base):
        return
    if is_sharded(model) and not now:
        setattr(body, LATER, True)
    elif looked_at(model).packs:
        if not uses_flash_attention(body):
            base.set_attn_implementation(PACKED)
        setattr(body, PACKS, attention_of(body))


def may_pack(base: PreTrainedModel) -> bool:
    """Return whether a model attends with `sdpa` or flash attention, causally, in all layers."""
    config = base.config
    kinds = set(getattr(config, "layer_types", None) or ())
    return (
        (uses_flash_attention(base) or attention_of(base) in ("sdpa", PACKED))
        and base._can_set_attn_implementation()
        and config.get_text_config() is config
        and kinds <= {"full_attention", "sliding_attention"}
        and all(getattr(module, "is_causal", True) for module in base.modules())
    )


# ---- What a model computes, seen in two short passes ----


class Look(NamedTuple):
    """What the passes over a few tokens have shown.

    Attributes:
        fault: Why the model cannot be trained with PPO, or None.
        pads_left: A row's states do not depend on padding before it.
        packs: Packed rows have the states of the rows alone.
    """

    fault: str | None = None
    pads_left: bool = True
    packs: bool = False


_WIDTH, _SHORT = 8, 3
"""Tokens of the two long rows, which differ in the last token, and of the short rows, which begin like them."""

_NOT_OF_LAYERS = (
    *("architectures", "_name_or_path", "dtype", "transformers_version", "vocab_size", "use_cache", "problem_type"),
    *("id2label", "label2id", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
)
"""Entries of a configuration that change nothing in the layers."""

_LOOKS: dict[Any, Look] = {}
"""By the class of the head, None without one, and the layers."""


def looked_at(model: nn.Module, logits: Callable[[nn.Module, Tensor], Tensor] | None = None) -> Look:
    """Run a model on a few tokens, once for each architecture: one padded pass, and a packed one where it may pack.

    In PPO a token's log-probability may depend on the earlier tokens of its row only: not on later tokens, padding or
    other rows. Packing needs in addition that each sliding layer gives its attention function the window: the packed
    attention does not read masks. Rows are shorter than a model's window, so their states alone would not show it.

    Args:
        model: A causal language model or a value model, or a `PeftModel` around one. If it is sharded, all ranks call
            this together.
        logits: Computes logits from hidden states; compared with the model's own.
    """
    base, body, weight = transformers_model(model), backbone(model), next(model.parameters())
    config = {name: value for name, value in text_config(model).to_dict().items() if name not in _NOT_OF_LAYERS}
    attention = str(attention_of(body)).replace(PACKED, "sdpa")
    kinds = map(type, body.modules())
    classes = frozenset(kind for kind in kinds if not kind.__module__.startswith(("torch.", "peft.")))
    layers = (json.dumps(config, default=str, sort_keys=True), attention, classes, weight.dtype, weight.device.type)
    head = None if logits is None else type(base)
    if (head, layers) in _LOOKS:
        return _LOOKS[head, layers]
    look = _look(base, body, logits)
    if look is None:  # weights that are not finite show nothing, and are reported at the first sampling
        return Look()
    _LOOKS[head, layers] = look
    _LOOKS.setdefault((None, layers), look)
    return look


@torch.no_grad()
def _look(base: PreTrainedModel, body: nn.Module, logits: Callable[[nn.Module, Tensor], Tensor] | None) -> Look | None:
    if base.config.model_type == "reformer":
        return Look("whose gradients cannot be computed outside training mode; use another decoder")
    device, size = next(base.parameters()).device, text_config(base).vocab_size
    row = (torch.arange(_WIDTH, device=device) * 7 + 1) % size
    ids = row.repeat(4, 1)
    ids[1, -1] = (row[-1] + 1) % size
    ids[3, -_SHORT:] = row[:_SHORT]
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[2, _SHORT:] = mask[3, :-_SHORT] = False
    places = PackedIndices.of(ids[:3], mask[:3])
    # Flash attention needs a GPU and 16 bits, which the model may not have yet.
    attention = str(attention_of(base))
    if uses_flash_attention(base):
        attention = "sdpa" if base._supports_sdpa else "eager"
    with in_eval_mode(base), preserve_rng(), attending(base, attention):
        states, models_logits = _padded_states(base, body, ids, mask, logits is not None)
        if not (states[mask].isfinite().all() and models_logits.isfinite().all()):
            return None
        fault = _fault(states)
        if logits is not None and fault is None:
            fault = _fault_of_head(logits(base, states[0]), models_logits[0].float())
        packs = may_pack(base) and _packs(base, body, ids[:3], places, states[:3][mask[:3]])
    pads_left = deviation(states[3, -_SHORT:], states[0, :_SHORT]) <= rounding(states)
    return Look(fault, pads_left, packs)


def _padded_states(
    base: PreTrainedModel, body: nn.Module, ids: Tensor, mask: Tensor, with_logits: bool
) -> tuple[Tensor, Tensor]:
    """Return hidden states `(4, L, H)` and the model's own logits; some classes call only a part of the backbone."""
    outputs: list[Any] = []
    hook = body.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    positions = {"position_ids": position_ids(mask)} if takes(type(body), "position_ids") else {}
    inputs = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False, "return_dict": True, **positions}
    try:
        logits = base(**inputs).logits if with_logits else ids.float()
        if not outputs:
            body(**inputs)
    finally:
        hook.remove()
    return outputs[0].last_hidden_state, logits


def _fault(states: Tensor) -> str | None:
    error = deviation(states[1, :-1], states[0, :-1])
    if error <= rounding(states):
        return None
    return (
        f"in which a token's state depends on later tokens (by {error:.2g}), so that it cannot generate from left to "
        "right; use a decoder"
    )


def _fault_of_head(ours: Tensor, theirs: Tensor) -> str | None:
    tolerance = 1e-2 if is_in_16_bits(ours) else 1e-4
    largest = float(theirs.abs().max())
    if ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * largest):
        return None
    return (
        "whose logits are not what its head makes of the last hidden states; use another decoder, or add its scaling "
        "to rlhf_ppo.models.policy_and_value.logit_scaling"
    )


def _packs(base: PreTrainedModel, body: nn.Module, ids: Tensor, places: PackedIndices, padded: Tensor) -> bool:
    """Pack two long rows and a short one, and record what each layer gives its attention function; then their tree."""
    masks_and_windows: list[tuple[Tensor | None, int | None]] = []

    def recording(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        masks_and_windows.append((attention_mask, kwargs.get("sliding_window")))
        return packed_sdpa(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(PACKED, recording)
    try:
        with attending(base, PACKED):
            packed = run_packed(body, ids, places)
            of_rows = [*masks_and_windows]
            shared = run_packed(body, ids, places, prefixes.prefix_tree(places.squeezed_rows, min_shared=1))
    except (RuntimeError, TypeError, ValueError):  # the model refuses, or does not know the arguments
        return False
    finally:
        AttentionInterface.register(PACKED, packed_sdpa)
    changes_mask = any(mask is None or mask.numel() != 1 for mask, _ in of_rows)
    windows = [window for _, window in of_rows if window is not None]
    row, twin, short = packed.split([_WIDTH, _WIDTH, _SHORT])
    # The same kernels on as many tokens, and other kernels, over many layers.
    leak, rounds = (2e-2, 1e-1) if is_in_16_bits(padded) else (1e-4, 1e-2)
    return (
        not changes_mask
        and len(windows) == _num_sliding(base.config)
        and _are_alike(torch.cat((twin[:-1], short)), torch.cat((row[:-1], row[:_SHORT])), leak)
        and _are_alike(packed, padded, rounds)
        and _are_alike(shared, packed, rounds)
    )


def _num_sliding(config: PreTrainedConfig) -> int:
    """Count the layers that attend to a window."""
    if kinds := getattr(config, "layer_types", None):
        return list(kinds).count("sliding_attention")
    return config.num_hidden_layers if getattr(config, "sliding_window", None) else 0


def deviation(states: Tensor, expected: Tensor) -> float:
    """Return the relative difference of states from expected states: `||x - y|| / ||y||`."""
    return float((states - expected).float().norm() / expected.float().norm().clamp(min=1e-30))


def _are_alike(states: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Compare each token's state `(N, H)`."""
    difference = (states - expected).float().norm(dim=1)
    return bool((difference <= tolerance * expected.float().norm(dim=1)).all())


@contextmanager
def attending(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use another attention inside a context.

    Args:
        model: A transformers model.
        name: transformers' name of the attention.
    """
    before = str(attention_of(model))
    if name != before:
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        if name != before:
            model.set_attn_implementation(before)


def unpacked(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Restore `sdpa` inside a context, for code that knows transformers' own attentions only."""
    return attending(model, "sdpa") if attention_of(model) == PACKED else nullcontext()
