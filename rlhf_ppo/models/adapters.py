"""PEFT adapters: adding, loading, copying, checks, and one base under several models."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf_ppo.models.heads import ValueHead, scalar_head
from rlhf_ppo.models.packing import takes
from rlhf_ppo.models.unwrapping import (
    active_adapter,
    backbone,
    is_managed,
    is_peft_model,
    transformers_model,
    with_adapters,
    without_activation_wrappers,
    without_wrapper,
)
from rlhf_ppo.models.value_model import new_value_model
from rlhf_ppo.ranks.processes import get_logger

if TYPE_CHECKING:
    from peft import PeftConfig

logger = get_logger(__name__)

EXACT_KINDS = frozenset(
    "ADALORA ADAPTION_PROMPT BEFT BOFT C3A DEFT DELORA FOURIERFT FROD GLORA GRALORA HIRA HRA IA3 LN_TUNING LOHA LOKR "
    "LORA MISS OFT OSF PEANUT PSOFT PVERA RANDLORA ROAD SHIRA SUPERTUNING TINYLORA TRAINABLE_TOKENS UNILORA VBLORA "
    "VERA WAVEFT".split()
)
"""PEFT's kinds of adapters whose passes here equal `PeftModel.forward` on each row alone, and which train.

Excluded: virtual tokens, routers that read the whole batch (Lily), and what acts in `PeftModel.forward` (X-LoRA)."""

INEXACT_OPTIONS = (
    "alora_invocation_tokens",  # in `PeftModel.forward`
    "monteclora_config",  # in training mode
    "arrow_config",  # trains no weights itself
    "ensure_weight_tying",  # PEFT adds half of a second such adapter
    "use_qalora",  # never run
)
"""Options of LoRA that are not exact."""

LOADED = "_hf_peft_config_loaded"
"""Attribute of a model, no `PeftModel`, into which transformers itself has loaded an adapter: True."""

MERGED = "_has_merged_adapter"
"""Attribute of a model whose weights hold an adapter that was merged in memory: no directory holds them. True."""

ADAPTER_DIRECTORY = "adapter_directory"
"""Attribute of a model over which an adapter was loaded, also after a merge: the adapter's directory."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` that change the weights below the adapter, or how these begin."""

_CHANGE_NO_OUTPUT = frozenset(
    "auto_mapping base_model_name_or_path inference_mode peft_version revision runtime_config task_type "
    "total_step".split()  # the last is AdaLoRA's, which grows with the run
)
"""Settings of adapters that a resumed run may change, besides dropout, which is off."""


def check_adapter(model: nn.Module, argument: str) -> None:
    """Check that a model's adapters act inside the layers, which run without `PeftModel.forward`.

    Args:
        model: Any model; without adapters it passes.
        argument: Name of the caller's argument, for the error message.

    Raises:
        ValueError: An adapter's kind or option acts elsewhere, or its layers are in a model that is no `PeftModel`.
    """
    if _holds_loose_layers(model):
        raise ValueError(
            f"{argument} is a {type(model).__name__} with the adapter layers of an earlier trainer or PeftModel, with "
            "which it would be saved wrongly: pass that trainer's PeftModel, or load the model again"
        )
    for config in (getattr(model, "peft_config", None) or {}).values():
        _check_kind(config, f"{argument} has an adapter")


def _holds_loose_layers(model: nn.Module) -> bool:
    """Return whether adapters are in a model's layers, but no `PeftModel` is around them.

    PEFT changes the model that it is given: it has the layers of the `PeftModel` that was made of it.
    """
    try:
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import ModulesToSaveWrapper
    except ImportError:
        return False
    parts = [] if getattr(model, LOADED, False) else [*model.modules()]
    has_layers = any(isinstance(part, BaseTunerLayer | ModulesToSaveWrapper) for part in parts)
    return has_layers and not any(isinstance(part, PeftModel) for part in parts)


def _check_kind(peft_config: PeftConfig, what: str) -> None:
    from peft import PeftType

    kind = PeftType(peft_config.peft_type).value
    option = next((f" with {name}" for name in INEXACT_OPTIONS if getattr(peft_config, name, None)), "")
    if kind not in EXACT_KINDS or option:
        raise ValueError(
            f"{what} of the kind {kind}{option}, whose log-probabilities and gradients would not be exact here, or "
            "were never tested: use LoRA, or another kind that docs/models.md names"
        )


def adapter_kind(model: nn.Module) -> str:
    """Return PEFT's name of the kind of a `PeftModel`'s active adapter, such as `LORA`."""
    from peft import PeftType

    return PeftType(with_adapters(model).active_peft_config.peft_type).value


# ---- Adding, loading and copying ----


def is_adapter_directory(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory holds a saved adapter."""
    return os.path.isfile(os.path.join(path, "adapter_config.json"))


def origin(model: nn.Module) -> str | None:
    """Return the path or hub name of a model, or of the adapter over it or merged into it; None: it has none."""
    base = transformers_model(model)
    return getattr(base, ADAPTER_DIRECTORY, None) or base.config._name_or_path or None


def adapter_config(path: str | os.PathLike[str]) -> PeftConfig:
    """Return the configuration of a saved adapter."""
    from peft import PeftConfig

    return PeftConfig.from_pretrained(os.fspath(path))


def base_of_adapter(path: str | os.PathLike[str]) -> str:
    """Return the directory or hub name of the model that a saved adapter belongs to."""
    return str(adapter_config(path).base_model_name_or_path)


def load_adapter(base: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load a trainable adapter over its base.

    A language model's adapter over a classifier of the same backbone becomes a classifier's, and the head trains too.
    A base that was trained with more tokens is resized: the adapter's files hold its embeddings.

    Raises:
        ValueError: The adapter was trained over another class of model: weights of this one's adapter are not in it.
    """
    from peft import PeftModel, PeftType, get_peft_model, load_peft_weights, set_peft_model_state_dict
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    config = adapter_config(path)
    setattr(base, ADAPTER_DIRECTORY, os.fspath(path))
    weights = load_peft_weights(os.fspath(path), device="cpu")
    _resize_as_saved(base, weights)
    if config.task_type != "CAUSAL_LM" or hasattr(base, "prepare_inputs_for_generation"):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*Found missing adapter keys", UserWarning)
            try:
                return PeftModel.from_pretrained(base, os.fspath(path), is_trainable=True, config=config)
            except UserWarning as warning:
                raise ValueError(_DOES_NOT_FIT.format(path, type(base).__name__, str(warning))) from None
    config.task_type, config.inference_mode = "SEQ_CLS", False
    model = get_peft_model(base, config)
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING[PeftType(config.peft_type)]
    if missing := [name for name in adapter_state(model).keys() - weights.keys() if prefix in name]:
        raise ValueError(_DOES_NOT_FIT.format(path, type(base).__name__, f"{min(missing)} is missing"))
    set_peft_model_state_dict(model, adapter_state(model) | weights)
    return model


def _resize_as_saved(base: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a base as many tokens as the embeddings have that are saved with an adapter, if any are."""
    model = transformers_model(base)
    tokens: Any = model.get_input_embeddings()
    name = re.escape(_name_in(model, tokens))
    saved = (key for key in weights if re.search(rf"\.{name}(\.token_adapter)?(\.base_layer)?\.weight$", key))
    count = next((len(weights[key]) for key in saved), None)
    if count not in (None, tokens.num_embeddings):
        model.resize_token_embeddings(count, mean_resizing=False)


_DOES_NOT_FIT = (
    "{} is an adapter over another class of model than {}, as which its base is loaded ({:.200}): load both yourself, "
    "and pass the PeftModel"
)


def unties_embeddings(model: nn.Module) -> bool:
    """Return whether an adapter changes tied embeddings and head separately."""
    if not is_peft_model(model) and not getattr(model, LOADED, False):
        return False
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    base = transformers_model(model)
    ends: Any = [base.get_input_embeddings(), base.get_output_embeddings()]
    matrices = [getattr(without_wrapper(end), "weight", None) for end in ends if end is not None]
    if len(matrices) < 2 or matrices[0] is not matrices[1]:
        return False
    adapted = (end for end in ends if isinstance(end, BaseTunerLayer | ModulesToSaveWrapper))
    return any(not isinstance(end, TrainableTokensLayer) for end in adapted)  # which changes both alike


def merged_in_place(model: nn.Module) -> nn.Module:
    """Merge the adapter that transformers has loaded into a model; PEFT merges its own models only."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for name, layer in [*model.named_modules()]:
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
        elif isinstance(layer, ModulesToSaveWrapper):
            model.set_submodule(name, layer.modules_to_save[layer.active_adapters[0]])
    setattr(model, LOADED, False)
    del model.peft_config
    return model


def save_adapter(model: nn.Module, directory: str, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write the active adapter directly into a directory, from which it can be loaded whatever its name.

    Args:
        model: A `PeftModel`.
        directory: The directory; PEFT would write an adapter not named "default" into a folder in it.
        state_dict: The model's weights, gathered by a backend; None takes them from the model.
    """
    name = active_adapter(model)
    options: dict[str, Any] = {"selected_adapters": [name], "state_dict": state_dict}
    with without_activation_wrappers(model):
        if name == "default":
            with_adapters(model).save_pretrained(directory, **options)
            return
        os.makedirs(directory, exist_ok=True)
        with TemporaryDirectory(dir=directory) as temporary:
            with_adapters(model).save_pretrained(temporary, **options)
            for path in Path(temporary, name).iterdir():
                os.replace(path, Path(directory, path.name))


def check_holds_adapter(state_dict: Mapping[str, Tensor], model: nn.Module) -> None:
    """Check that PEFT finds each trained weight of the active adapter among gathered ones, whose names may differ.

    Args:
        state_dict: The model's weights, gathered by a backend.
        model: A `PeftModel`.

    Raises:
        RuntimeError: `save_adapter` would leave a trained weight out.
    """
    with without_activation_wrappers(model):
        live = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        needed = adapter_state(model, live).items()
        trained = {name for name, weight in needed if isinstance(weight, nn.Parameter) and weight.requires_grad}
        lost = trained - adapter_state(model, state_dict).keys()
    if lost:
        raise RuntimeError(
            f"the adapter is not saved: PEFT does not find the trained {min(lost)} among the weights that the "
            "launcher's backend has gathered; launch with DDP or a lower ZeRO stage"
        )


def add_adapter(policy: nn.Module, peft_config: PeftConfig, name: str | None, base_serves_others: bool) -> nn.Module:
    """Add a new adapter to the policy.

    Args:
        policy: A causal language model.
        peft_config: A `peft.PeftConfig`.
        name: The adapter's name; PEFT's `"default"` when None.
        base_serves_others: The policy without the adapter is also the reference, or the base of other models.

    Returns:
        The policy as a `PeftModel`.

    Raises:
        ValueError: The policy has an adapter, the method is unsuitable, or the base would change.
    """
    from peft import get_peft_model

    _check_config(policy, peft_config, "model", "peft_config")
    if peft_config.task_type not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"peft_config has task_type={str(peft_config.task_type)!r}, with which the policy would be saved; leave "
            "it out, or set 'CAUSAL_LM'"
        )
    if base_serves_others:
        _check_base_stays(peft_config, "peft_config")
    return get_peft_model(policy, _in_language_model(policy, peft_config), adapter_name=name or "default")


def add_value_adapter(value_model: nn.Module, peft_config: PeftConfig) -> nn.Module:
    """Add a new adapter to the value model, and train the head with it.

    Args:
        value_model: A model with a per-token scalar head.
        peft_config: A `peft.PeftConfig`; the head is added to its `modules_to_save`.

    Returns:
        The value model as a `PeftModel`.

    Raises:
        ValueError: The value model has an adapter, or the method is unsuitable.
    """
    from peft import get_peft_model

    _check_config(value_model, peft_config, "value_model", "value_peft_config")
    if not hasattr(peft_config, "modules_to_save"):
        raise ValueError(
            f"value_peft_config is a {type(peft_config).__name__}, which has no modules_to_save, so that the head "
            "would not be trained; pass a config such as LoraConfig"
        )
    head = scalar_head(value_model)
    name = next(name for name, module in value_model.named_modules() if module is head)
    modules = {name, *(getattr(peft_config, "modules_to_save", None) or ())}
    config = dataclasses.replace(peft_config, modules_to_save=sorted(modules), task_type="SEQ_CLS")
    return get_peft_model(value_model, _in_language_model(value_model, config))


def _in_language_model(model: nn.Module, peft_config: PeftConfig) -> PeftConfig:
    """Keep adapters off vision towers, unless the configuration names one, excludes modules or has a pattern."""
    body, decoder = backbone(model), transformers_model(model).get_decoder()
    targets = getattr(peft_config, "target_modules", None)
    has_towers = decoder is not body and takes(type(body), "pixel_values")
    if not has_towers or getattr(peft_config, "exclude_modules", "") is not None:
        return _without_routers(model, peft_config)
    towers = [name for name, part in body.named_children() if decoder not in part.modules()]
    is_pattern = isinstance(targets, str) and targets != "all-linear"
    if is_pattern or any(tower in target for tower in towers for target in targets or ()):
        return peft_config
    return dataclasses.replace(peft_config, exclude_modules=rf"(.*\.)?({'|'.join(towers)})(\..*)?")


def _without_routers(model: nn.Module, peft_config: PeftConfig) -> PeftConfig:
    """Keep "all-linear" off linear layers that return tuples, which PEFT cannot adapt: routers of Llama 4, Phi MoE."""
    linear = [(name, type(part)) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    routers = sorted({name.rpartition(".")[2] for name, kind in linear if kind.__name__.endswith("Router")})
    excludes_nothing = getattr(peft_config, "exclude_modules", routers) is None
    is_free = excludes_nothing and getattr(peft_config, "target_modules", None) == "all-linear"
    return dataclasses.replace(peft_config, exclude_modules=routers) if routers and is_free else peft_config


@contextmanager
def preserve_base(model: nn.Module) -> Iterator[None]:
    """Restore the weights below adapters, bit for bit, after a context that merges and unmerges the adapters.

    Merging rounds: a bfloat16 base drifts by percents in some dozens of updates, with every model that shares it. The
    copies are in the host's memory: a GPU that also holds vLLM has no room for them.

    Args:
        model: A model with adapters or without.
    """
    below = [
        weight
        for name, weight in model.named_parameters()
        if ".base_layer." in name and weight.is_floating_point() and weight.numel()
    ]
    before = [torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda) for weight in below]
    for weight, kept in zip(below, before, strict=True):
        kept.copy_(weight.detach(), non_blocking=True)
    try:
        yield
    finally:
        for weight, kept in zip(below, before, strict=True):
            weight.data.copy_(kept, non_blocking=True)


def copy_adapter(source: nn.Module, target: nn.Module) -> None:
    """Copy the active adapter's weights below the heads from a `PeftModel` into another of the same kind.

    Args:
        source: Its backbone has at least the adapter's parameters of `target`.
        target: Receives them.
    """
    from peft import set_peft_model_state_dict

    place, new_place = (f"{_name_in(model, backbone(model))}." for model in (source, target))
    heads = f"{_name_in(source, transformers_model(source))}."
    state = adapter_state(target)  # with the head's
    for name, value in adapter_state(source).items():
        if name.startswith(place):
            state[name.replace(place, new_place, 1)] = value
        elif not name.startswith(heads):  # shared by all layers
            state[name] = value
    set_peft_model_state_dict(target, state, adapter_name=active_adapter(target))


def adapter_state(model: nn.Module, state_dict: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the weights and buffers of a `PeftModel`'s active adapter; names omit the adapter's."""
    from peft import get_peft_model_state_dict

    name = active_adapter(model)
    return get_peft_model_state_dict(model, state_dict, adapter_name=name, save_embedding_layers=False)


def trained_but_not_saved(model: nn.Module) -> str | None:
    """Return the name of a trained weight that PEFT does not save with a `PeftModel`'s active adapter, or None."""
    if not is_peft_model(model) or is_managed(model):
        return None
    saved = {value.data_ptr() for value in adapter_state(model).values()}
    trained = (
        name for name, weight in model.named_parameters() if weight.requires_grad and weight.data_ptr() not in saved
    )
    return next(trained, None)


def _name_in(model: nn.Module, part: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)


def load_adapter_weights(model: nn.Module, directory: str) -> list[str]:
    """Read the active adapter's weights, as `save_adapter` wrote them, into a `PeftModel`.

    Args:
        model: The `PeftModel`.
        directory: The directory that was given to `save_adapter`.

    Returns:
        The names of weights that only the model or only the directory has.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    weights = load_peft_weights(directory, device="cpu")
    result = set_peft_model_state_dict(model, weights, adapter_name=active_adapter(model))
    return [*(adapter_state(model).keys() - weights.keys()), *result.unexpected_keys]


def changed_settings(model: nn.Module, directory: str) -> list[str]:
    """Describe each setting of a `PeftModel`'s active adapter in which a saved adapter computes something else."""
    before, now = _settings(adapter_config(directory)), _settings(with_adapters(model).active_peft_config)
    return [f"{name}={before.get(name)}, now {value}" for name, value in now.items() if before.get(name) != value]


def adapter_settings(model: nn.Module) -> dict[str, Any]:
    """Return the settings of a `PeftModel`'s active adapter that change its output and are not empty."""
    return {name: value for name, value in _settings(with_adapters(model).active_peft_config).items() if value}


def _settings(config: PeftConfig) -> dict[str, Any]:
    """Return an adapter's settings as JSON values, without those that change no output; sets of names are sorted."""
    values = json.loads(json.dumps(config.to_dict(), default=list))
    return {
        name: sorted({*value}) if isinstance(value, list) and all(isinstance(item, str) for item in value) else value
        for name, value in values.items()
        if name not in _CHANGE_NO_OUTPUT and "dropout" not in name
    }


def activate_adapter(policy: nn.Module, name: str | None) -> None:
    """Activate the adapter to train.

    Args:
        policy: A `PeftModel`.
        name: The adapter's name; the active one when None.

    Raises:
        ValueError: There is no such adapter.
    """
    adapted = with_adapters(policy)
    active, adapters = active_adapter(policy), list(adapted.peft_config)
    fault = "is not an adapter" if name not in (None, *adapters) else None
    if name is None and len(adapted.active_adapters) > 1:
        fault = "does not name one of the active adapters"
    if fault is not None:
        raise ValueError(f"model_adapter_name={name!r} {fault} of the policy, which has {adapters}")
    is_trained = any(weight.requires_grad for weight in policy.parameters())  # not so if loaded for inference
    with trained_weights_kept(policy) if is_trained and name in (None, active) else nullcontext():
        adapted.set_adapter(name or active)


@contextmanager
def trained_weights_kept(policy: nn.Module) -> Iterator[None]:
    """Restore which weights are trained after a context in which PEFT adds or switches adapters.

    PEFT sets `requires_grad` of whole adapters, and so would train what the user has frozen.

    Args:
        policy: A `PeftModel`; weights that are added inside the context are not trained.
    """
    trained = {id(weight) for weight in policy.parameters() if weight.requires_grad}
    try:
        yield
    finally:
        for weight in policy.parameters():
            weight.requires_grad_(id(weight) in trained)


def trained_in_base(policy: nn.Module) -> str | None:
    """Return the name of a trained weight outside of a `PeftModel`'s adapters, which all of them share, or None."""
    return next(
        (
            f"{name}.{key}"
            for name, module in _bare_modules(transformers_model(policy))
            for key, weight in module._parameters.items()
            if weight is not None and weight.requires_grad
        ),
        None,
    )


def _check_config(model: nn.Module, peft_config: PeftConfig, role: str, argument: str) -> None:
    fault, leave = None, f"leave {argument} out"
    if isinstance(model, ValueHead):
        fault = f"is a head on the policy, without layers to adapt, and {argument} is given too: {leave}"
    elif is_peft_model(model) or getattr(model, MERGED, False):
        fault = (
            f"starts from an adapter, and {argument} asks for another one over the merged weights, which no directory "
            f"holds: {leave} to train on from it, or call merge_and_unload(), save the model and pass its directory"
        )
    if fault is not None:
        raise ValueError(f"{role} {fault}")
    _check_kind(peft_config, f"{argument} is")


def _check_base_stays(peft_config: PeftConfig, argument: str) -> None:
    """Check that the model without the adapter is the given model, before and after training."""
    fix = (
        "which is the reference's too, and with share_base_model=True the value model's: choose another setting, or "
        "pass ref_model and leave share_base_model=False"
    )
    bias, option = getattr(peft_config, "bias", "none"), _changes_base(peft_config)
    fault = f"{option}, which changes the weights" if option else f"bias={bias!r}, which trains biases"
    if option or bias != "none":
        raise ValueError(f"{argument} has {fault} of the base, {fix}")


@contextmanager
def config_of_another(policy: nn.Module) -> Iterator[PeftConfig]:
    """Yield the configuration of a further adapter like a `PeftModel`'s active one; keep the base while it is added.

    Some configurations change the base once more with each adapter: PiSSA subtracts it, and layers are replicated.
    """
    config: Any = copy.deepcopy(with_adapters(policy).active_peft_config)
    if getattr(config, "layer_replication", None):
        config.layer_replication = None
    with preserve_base(policy) if _changes_base(config) else nullcontext():
        yield config


def _changes_base(peft_config: PeftConfig) -> str | None:
    """Return the option with which a new adapter changes the weights below it, or None."""
    how, kasa = getattr(peft_config, "init_lora_weights", True), getattr(peft_config, "kasa_config", None)
    if str(how).startswith(_CHANGES_BASE):
        return f"init_lora_weights={how!r}"
    return None if kasa is None else f"kasa_config={kasa}"


# ---- One base under several models ----


def value_model_over(policy: nn.Module, value_model: nn.Module | None, peft_config: PeftConfig | None) -> nn.Module:
    """Make a value model that shares the policy's base.

    Each model keeps its own modules, which hold the same parameters: no adapter is switched between a forward pass and
    its backward pass, which may recompute activations.

    Args:
        policy: A `PeftModel`.
        value_model: A value model with the base's weights below the head, a `ValueHead`, which has none, or None to
            make it, with a zero head.
        peft_config: The `peft.PeftConfig` of the value model's adapter. None: the adapter of `value_model`, or a
            configuration like the policy's, for `value_model=None` with a copy of the policy's adapter.

    Returns:
        The value model as a `PeftModel` with a separate adapter and head.

    Raises:
        ValueError: The policy has no adapter, trains its base, or has a base that differs from the value model's.
    """
    _check_base_is_frozen(policy)
    is_new = value_model is None
    value_model = _scorer_with_zero_head(policy) if value_model is None else value_model
    if peft_config is not None:
        _check_base_stays(peft_config, "value_peft_config")
        value_model = add_value_adapter(value_model, peft_config)
    elif isinstance(value_model, ValueHead):
        return value_model
    elif not is_peft_model(value_model):
        with config_of_another(policy) as config:
            value_model = _with_adapter_like(config, value_model)
        if is_new:
            copy_adapter(policy, value_model)
    if (difference := share_base(value_model, policy)) is not None:
        raise ValueError(
            f"share_base_model=True, but value_model has a different base from model: {difference}; pass an adapter "
            "over the policy's base, or value_model=None to have one made"
        )
    return value_model


@torch.no_grad()
def share_base(model: nn.Module, policy: nn.Module) -> str | None:
    """Replace the parameters of a model's base by the policy's, if they are equal in the policy's precision.

    Adapters and heads stay separate.

    Args:
        model: A `PeftModel`, which is changed in place.
        policy: The `PeftModel` with the shared base.

    Returns:
        None, or the difference between the two bases; the model is then unchanged.
    """
    replaced, shared = (
        {name: module._parameters for name, module in _bare_modules(backbone(whole)) if module._parameters}
        for whole in (model, policy)
    )
    if missing := sorted(shared.keys() ^ replaced.keys()):
        return f"only one of them has {missing[0]}"
    for name, parameters in replaced.items():
        for key, value in parameters.items():
            other = shared[name].get(key)
            if value is other:
                continue
            if value is None or other is None or not torch.equal(value.to(other), other):
                return f"{name}.{key} is not the same"
    for name, parameters in replaced.items():
        parameters.update(shared[name])
    return None


def shares_parameters(model: nn.Module, other: nn.Module) -> bool:
    """Return whether two models share a parameter."""
    return not {id(value) for value in model.parameters()}.isdisjoint(id(value) for value in other.parameters())


def _scorer_with_zero_head(policy: nn.Module) -> nn.Module:
    """Make a value model over the policy's base, without the policy's adapters."""
    original = transformers_model(policy)
    device = next(original.parameters()).device
    with torch.device("meta"):
        scorer = new_value_model(original)
    shared = {id(value): value for value in backbone(policy).parameters()}
    body: Any = copy.deepcopy(backbone(policy), shared)
    _strip_adapters(body)
    setattr(scorer, scorer.base_model_prefix, body)
    scorer.config, body.config.num_labels = body.config, 1  # older transformers set the attention of one of two only
    nn.init.zeros_(scorer.score.to_empty(device=device).weight)
    for name in ("is_quantized", "hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        if hasattr(original, name):  # PEFT and Trainer treat quantized models as their own kind
            setattr(scorer, name, getattr(original, name))
    return scorer.train()


def _with_adapter_like(config: PeftConfig, model: nn.Module) -> nn.Module:
    """Add an adapter with the policy's configuration to a model without a language-model head."""
    names = [name for name, _ in backbone(model).named_modules()]

    def is_there(name: str) -> bool:
        return any(full == name or full.endswith(f".{name}") for full in names)

    changes: dict[str, object] = {"inference_mode": False}
    if modules := getattr(config, "modules_to_save", None):
        changes["modules_to_save"] = [name for name in modules if is_there(name)] or None
    if isinstance(tokens := getattr(config, "trainable_token_indices", None), dict):
        changes["trainable_token_indices"] = {name: ids for name, ids in tokens.items() if is_there(name)}
    return add_value_adapter(model, dataclasses.replace(config, **changes))


def _check_base_is_frozen(policy: nn.Module) -> None:
    if not is_peft_model(policy):
        raise ValueError("share_base_model=True, but all weights of model are trained; pass peft_config")
    if (weight := trained_in_base(policy)) is not None:
        raise ValueError(
            f"share_base_model=True, but the policy's adapter, of the kind {adapter_kind(policy)}, trains {weight} of "
            "the base, which all models share; set bias='none' in peft_config, or choose a kind such as LoRA"
        )


def _bare_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules below adapters, with their original names."""
    yield name, module
    for child_name, child in module.named_children():
        yield from _bare_modules(without_wrapper(child), f"{name}.{child_name}".lstrip("."))


def _strip_adapters(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        setattr(module, name, without_wrapper(child))
        _strip_adapters(getattr(module, name))
