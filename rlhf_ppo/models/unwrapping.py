"""The transformers model inside its wrappers: parts, configuration, modes of learning, ZeRO-3 shards and copies.

The processes of a node map one copy of the weights until they change or shard them.

Modules stay in eval mode while models learn. Dropout, jitter and random routing happen where `training` is True: the
importance ratio would not start at 1. Only modules that recompute activations, which transformers does in training
mode alone, are in training mode; they switch to eval mode inside the recomputed function.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import PartialState, init_empty_weights
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import ModelOutput

from rlhf_ppo.processes.distributed import any_rank, get_logger, mixed_precision_dtype, raise_on_all_ranks

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftModel
    from transformers import PreTrainedConfig, TrainingArguments
    from typing_extensions import TypeIs

logger = get_logger(__name__)

CACHE = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"
"""Name of the key-value cache in arguments and outputs; transformers 5.24 renamed it, and warns of the old name."""


def is_peft_model(model: nn.Module) -> TypeIs[PeftModel]:
    """Return whether `model` is a `peft.PeftModel` (False where PEFT is not installed)."""
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(model, PeftModel)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a `PeftModel` (adapters stay injected), or `model` itself."""
    # No isinstance: tests and checks pass other classes.
    return cast(PreTrainedModel, model.get_base_model() if is_peft_model(model) else model)


def as_module(model: object) -> nn.Module:
    """Return a model as a `torch.nn.Module`, which Trainer's types do not state; a `TypeError` if it is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model must be a torch.nn.Module, not {type(model).__name__}")
    return model


def with_adapters(model: nn.Module) -> PeftModel:
    """Return a model as a `peft.PeftModel`; a `TypeError` if it is none."""
    if not is_peft_model(model):
        raise TypeError(f"{type(model).__name__} has no adapters of PEFT")
    return model


def active_adapter(model: nn.Module) -> str:
    """Return the name of a `PeftModel`'s active adapter; a `TypeError` if it has none or several."""
    name = with_adapters(model).active_adapter
    if not isinstance(name, str):
        raise TypeError(f"one adapter must be active, not {name!r}")
    return name


def output_layer(policy: nn.Module) -> nn.Module:
    """Return a language model's head; a `TypeError` if it has none."""
    head = transformers_model(policy).get_output_embeddings()
    if head is None:
        raise TypeError(f"{type(policy).__name__} has no language-model head")
    return head


def backbone(model: nn.Module) -> nn.Module:
    """Return the part of a model below its head, which computes hidden states."""
    base = transformers_model(model)
    body = base.base_model
    if body is not base:
        return body
    # Some classes declare another prefix than the name of their backbone (Llama4).
    parts = [child for child in base.children() if isinstance(child, PreTrainedModel)]
    return parts[0] if len(parts) == 1 else base


def text_config(model: nn.Module) -> PreTrainedConfig:
    """Return the configuration of the language model, also inside a model with vision (Gemma 3)."""
    return transformers_model(model).config.get_text_config()


@contextmanager
def configuration_kept(model: nn.Module, name: str) -> Iterator[None]:
    """Restore an entry of a model's configuration, which is saved with the model, after a context."""
    config = transformers_model(model).config
    was_there, value = hasattr(config, name), getattr(config, name, None)
    try:
        yield
    finally:
        if was_there:
            setattr(config, name, value)
        elif hasattr(config, name):
            delattr(config, name)


def no_split_modules(*models: nn.Module) -> list[str]:
    """Name the classes of the blocks that FSDP wraps one by one."""
    return sorted({name for model in models for name in transformers_model(model)._no_split_modules or ()})


def drop_foreign_padding(model: nn.Module) -> None:
    """Unset a `pad_token_id` outside the model's vocabulary.

    Trainer copies the tokenizer's special tokens into the saved configurations. Most architectures cannot be loaded
    with an added "[PAD]" beyond the vocabulary.

    Args:
        model: A transformers model, or a `PeftModel` around one.
    """
    generation_config = getattr(transformers_model(model), "generation_config", None)
    for config in (text_config(model), generation_config):
        if config is not None and (config.pad_token_id or 0) >= text_config(model).vocab_size:
            config.pad_token_id = None


def drop_ignored_generation_settings(model: nn.Module) -> None:
    """Unset what `generate` ignores in a `generation_config`, such as a temperature without `do_sample`.

    Many published models have such settings, and transformers refuses to save a `generation_config` that holds them
    if anything in it has changed, as Trainer changes its special tokens. The run would end in its first checkpoint.

    Args:
        model: A transformers model, or a `PeftModel` around one.

    Raises:
        ValueError: The configuration cannot be saved for another reason.
    """
    config = getattr(transformers_model(model), "generation_config", None)
    try:
        if config is not None:
            config.validate(strict=True)
    except ValueError as error:
        names = re.findall(r"^- `(\w+)`: ", str(error), re.MULTILINE)
        if not names:
            raise ValueError(f"the generation_config of the model cannot be saved: {error}") from error
        for name in names:
            setattr(config, name, None)
        logger.warning(
            f"The model is saved without {', '.join(names)} of its generation_config, which generate() ignores as it "
            "is and transformers refuses to save; to keep a setting for sampling, set do_sample=True beside it."
        )


# ---- Probes and precision ----


def probe_ids(model: nn.Module) -> Tensor:
    """Return a tiny valid input for one-off checks of a model, long `(1, 3)`."""
    device = next(model.parameters()).device
    return torch.tensor([[1, 2, 3]], device=device) % text_config(model).vocab_size


def probe_rows(model: nn.Module, lengths: Sequence[int], left: bool = False) -> tuple[Tensor, Tensor]:
    """Return ids and mask `(B, L)` of padded rows for one-off checks of a model.

    Args:
        model: The model that reads the ids.
        lengths: Number of real tokens of each row.
        left: Pad on the left, otherwise on the right.
    """
    device, width = next(model.parameters()).device, max(lengths)
    ids = torch.arange(len(lengths) * width, device=device).view(-1, width) * 7 + 1
    mask = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
    return ids % text_config(model).vocab_size, mask.flip(1) if left else mask


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the type to which autocast casts on a type of device, or None without autocast."""
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def multiplied_dtype(source: Accelerator | TrainingArguments, policy: nn.Module) -> torch.dtype:
    """Return the type of a policy's matrix products: that of mixed precision, or else that of its weights."""
    return mixed_precision_dtype(source) or next(
        weight.dtype for weight in policy.parameters() if weight.is_floating_point()
    )


def is_in_16_bits(states: Tensor) -> bool:
    """Return whether states were computed in 16 bits, by their type or under autocast."""
    return states.dtype.itemsize == 2 or autocast_dtype(states.device.type) is not None


def autocast_if_stored_in_16_bits(model: nn.Module) -> torch.autocast:
    """Return a context in which a model with weights in 16 bits may have a head in 32 bits."""
    weight = next(model.parameters())
    return torch.autocast(weight.device.type, torch.bfloat16, enabled=weight.dtype in (torch.bfloat16, torch.float16))


# ---- Learning without randomness ----

_CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute in which transformers keeps the function that recomputes a module's activations."""


def set_learning(model: nn.Module) -> None:
    """Put all modules of a model in eval mode, except those that recompute their activations."""
    for module in model.modules():
        # A stack of layers that recompute by themselves does not recompute.
        module.training = getattr(module, "gradient_checkpointing", False) and not any(
            isinstance(part, GradientCheckpointingLayer) for part in module.modules() if part is not module
        )


def recompute_in_eval_mode(model: nn.Module) -> None:
    """Let modules that recompute activations, and are in training mode for it, compute in eval mode.

    Args:
        model: A model whose `gradient_checkpointing_enable` has just been called.
    """
    for module in model.modules():
        checkpoint = vars(module).get(_CHECKPOINT)
        if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpointed:
            setattr(module, _CHECKPOINT, functools.partial(_checkpointed, checkpoint, module))


def _checkpointed(checkpoint: Callable[..., Any], module: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    def in_eval_mode(*args: Any) -> Any:
        was_training, module.training = module.training, False
        try:
            return function(*args)
        finally:
            module.training = was_training

    return checkpoint(in_eval_mode, *args)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode inside a context; restore each module's mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def as_in_learning(
    checkpointing: bool, checkpointing_kwargs: Mapping[str, Any] | None, *models: nn.Module
) -> Iterator[None]:
    """Let models compute as while they learn, with or without recomputation; restore their modes after the context.

    Args:
        checkpointing: Whether activations are to be recomputed: `args.gradient_checkpointing`.
        checkpointing_kwargs: How: `args.gradient_checkpointing_kwargs`.
        *models: Transformers models, or `PeftModel`s around them.

    Raises:
        ValueError: An architecture cannot recompute activations.
    """
    bases: list[Any] = [transformers_model(model) for model in models] if checkpointing else []
    given = dict(checkpointing_kwargs or {})
    cut = {name: given.pop(name) for name in ("every_n_layers", "offload") if name in given}
    # Renamed after 5.17; there the old name warns.
    kind = "activation" if all(hasattr(base, "activation_checkpointing_enable") for base in bases) else "gradient"
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(in_eval_mode(model))
        for base in bases:
            getattr(base, f"{kind}_checkpointing_enable")(given or None, **cut)
            stack.callback(getattr(base, f"{kind}_checkpointing_disable"))
            recompute_in_eval_mode(base)
        for model in models:
            set_learning(model)
        yield


# ---- Sharded parameters ----


def is_managed(model: nn.Module) -> bool:
    """Return whether DeepSpeed ZeRO-3 shards the parameters, which may be gathered at the moment."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def gathers_in_passes(model: nn.Module) -> bool:
    """Return whether ZeRO-3's hooks gather the parameters in each forward pass, which then takes all ranks."""
    return any(is_zero_hook(hook) for module in model.modules() for hook in module._forward_pre_hooks.values())


def is_zero_hook(hook: object) -> bool:
    """Return whether a module's hook is DeepSpeed's, which gathers or releases parameters."""
    return str(getattr(hook, "__module__", "")).startswith("deepspeed")


def is_sharded(model: nn.Module) -> bool:
    """Return whether DeepSpeed ZeRO-3 has sharded the parameters: they are empty outside its hooks."""
    return any(hasattr(parameter, "ds_id") and parameter.numel() == 0 for parameter in model.parameters())


def own_share(parameter: Any) -> Tensor:
    """Return this rank's share of a parameter that ZeRO-3 or FSDP2 may have sharded: its own memory, no gradient."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    whole = parameter.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def gathered(parameters: Iterable[Tensor], modify: bool = False) -> AbstractContextManager[None]:
    """Gather parameters that ZeRO-3 has sharded inside a context, which every rank enters.

    Args:
        parameters: Sharded or not.
        modify: Keep the values that rank 0 writes.
    """
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if modify else None)


# ---- Copies ----


def copy_model(model: nn.Module) -> nn.Module:
    """Copy a model, once for the processes of a node.

    The copy of a sharded model is sharded too, and a rank holds at most one whole parameter.
    """
    if not is_sharded(model):
        return copy_once(model)
    original = transformers_model(model)
    twin = type(original)._from_config(copy.deepcopy(original.config))
    copy_weights(original, twin)
    return twin.train(original.training)


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy parameters and buffers by name, one at a time.

    Args:
        source: Has at least the parameters and buffers of `target`.
        target: Receives them.
    """
    for name, parameter in target.named_parameters():
        original = source.get_parameter(name)
        with gathered([original, parameter], modify=True):
            parameter.copy_(original)
    for name, buffer in target.named_buffers():
        buffer.copy_(source.get_buffer(name))


# ---- One copy for the processes of a node ----


_AT_ONCE = 64
"""Tensors of one exchange; each is an open file of the first process until the others have mapped it."""


@functools.cache
def is_shared() -> bool:
    """Return whether processes of this node load the same models whole, and can map each other's memory.

    Every rank must call this.
    """
    several = torch.distributed.is_initialized() and PartialState().num_processes > 1 < _processes_of_node()
    if not several or not hasattr(os, "memfd_create") or is_deepspeed_zero3_enabled():
        return False
    file = os.memfd_create("rlhf_ppo")
    others = [path for node, path in gather_object([(_node(), _path(file))]) if node == _node()]
    can_map = not any_rank(not all(os.access(path, os.R_OK | os.W_OK) for path in others))
    os.close(file)
    return can_map


def hold_once(values: Sequence[Tensor]) -> list[Tensor]:
    """Return the values that the first process of the node has, in memory that all of its processes map.

    A process that writes to a tensor gets its own copy of the written pages. Every rank calls this.

    Args:
        values: Tensors in host memory; in other processes only their number is read.

    Raises:
        OSError: A process cannot open the first one's memory; on all ranks.
    """
    held: list[Tensor] = []
    for start in range(0, len(values), _AT_ONCE):
        held += _hold_some(values[start : start + _AT_ONCE])
    return held


def _hold_some(values: Sequence[Tensor]) -> list[Tensor]:
    state = PartialState()
    files: list[int] = []
    with raise_on_all_ranks(state):
        if state.is_local_main_process:
            files = [_written(value) for value in values]
    places = [(_path(file), *_form(value)) for file, value in zip(files, values, strict=False)]
    try:
        of_nodes = gather_object([(_node(), places)])
        with raise_on_all_ranks(state):
            return [_mapped(*place) for node, found in of_nodes if node == _node() for place in found]
    finally:  # all have mapped them
        for file in files:
            os.close(file)


def _written(value: Tensor) -> int:
    file = os.memfd_create("rlhf_ppo")
    _mapped(_path(file), *_form(value), is_written=True).copy_(value.detach())
    return file


def _mapped(path: str, shape: torch.Size, dtype: torch.dtype, is_written: bool = False) -> Tensor:
    size = shape.numel() * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    storage: Any = torch.UntypedStorage.from_file(path, shared=is_written, nbytes=size)
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


def _path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"


def _form(value: Tensor) -> tuple[torch.Size, torch.dtype]:
    return value.shape, value.dtype


def _processes_of_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _node() -> int:
    return PartialState().process_index // _processes_of_node()


# ---- Models ----


def copy_once(model: nn.Module) -> nn.Module:
    """Copy a model; the processes of a node hold one copy of its weights."""
    parameters = list(model.parameters())
    if not is_shared() or not _are_plain(parameters):
        return copy.deepcopy(model)
    held = zip(parameters, hold_once([value.data for value in parameters]), strict=True)
    return copy.deepcopy(model, {id(value): nn.Parameter(same, value.requires_grad) for value, same in held})


def load_once(load: Callable[..., Any], dtype: torch.dtype | str) -> Any:
    """Load a model; the processes of a node hold one copy of its weights.

    `from_pretrained` maps the files of a checkpoint. Weights that it converts would be in the memory of each process.

    Args:
        load: Calls `from_pretrained` with a `dtype`, perhaps with `output_loading_info`.
        dtype: The type of the weights.

    Returns:
        The result of `load`.
    """
    if not isinstance(dtype, torch.dtype) or not is_shared():
        return load(dtype)
    state = PartialState()
    with raise_on_all_ranks(state):
        loaded = load(dtype if state.is_local_main_process else "auto")
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    if any_rank(not _are_plain(parameters)):  # quantized
        return loaded if state.is_local_main_process else load(dtype)
    if any_rank(any(value.dtype != dtype for value in parameters)):  # the first converted them
        for part in model.modules():
            if isinstance(config := getattr(part, "config", None), PreTrainedConfig):
                config.dtype = dtype
        _take_from_first(model)
    return loaded


def make_once(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model with new weights; the processes of a node hold one copy of them."""
    if not is_shared():
        return make()
    if PartialState().is_local_main_process:
        model = make()
    else:
        with init_empty_weights(include_buffers=False):
            model = make()
        getattr(model, "tie_weights", lambda: None)()
    _take_from_first(model)
    return model


def cast_once(values: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Convert tensors that all processes have; those of a node hold one copy of each that is in host memory."""
    if not is_shared() or any_rank(any(value.device.type != "cpu" for value in values)):
        return [value.to(dtype) for value in values]
    is_first, found = PartialState().is_local_main_process, list[Tensor]()
    for start in range(0, len(values), _AT_ONCE):
        some = values[start : start + _AT_ONCE]
        found += hold_once([value.to(dtype) for value in some] if is_first else some)
    return found


def _take_from_first(model: nn.Module) -> None:
    """Give a model the parameters of the first process of the node, and the generator its state."""
    (state,) = hold_once([torch.get_rng_state()])
    torch.set_rng_state(state.clone())
    instead: dict[int, nn.Parameter] = {}
    parameters = list(model.parameters())
    for start in range(0, len(parameters), _AT_ONCE):  # the first process has few tensors twice
        some = parameters[start : start + _AT_ONCE]
        for value, mapped in zip(some, hold_once([value.data for value in some]), strict=True):
            if value.is_meta:
                instead[id(value)] = nn.Parameter(mapped, value.requires_grad)
            else:
                value.data = mapped
    for part in model.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = instead.get(id(value), value)


def _are_plain(parameters: Sequence[Tensor]) -> bool:
    return all(type(value) is nn.Parameter and value.device.type == "cpu" for value in parameters)
