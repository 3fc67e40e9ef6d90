"""Models given as objects, directories or hub names; a value model made when none is given."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_ppo.models.adapter_checks import adapter_kind
from rlhf_ppo.models.adapters import base_of_adapter, is_adapter_directory, load_adapter
from rlhf_ppo.models.copying import copy_model, copy_weights
from rlhf_ppo.models.heads import check_one_label, head_of_scorer, reads_last_token, scalar_head
from rlhf_ppo.models.labels import keep_label, label_index, num_labels
from rlhf_ppo.models.packing import pack_rows
from rlhf_ppo.models.sharded import gathered, is_sharded
from rlhf_ppo.models.unwrapping import backbone, is_peft_model, transformers_model, weight_of
from rlhf_ppo.terminal.quiet import bars_of_models_on_terminals


def load_policy(model: nn.Module | str | os.PathLike[str], argument: str) -> nn.Module:
    """Return the causal language model itself, or load it from a directory or the hub, in float32.

    A directory with an adapter gives a `PeftModel` over the base that the adapter names.

    Args:
        model: The model, a directory, or a hub name.
        argument: What the caller's argument is called, for error messages.

    Raises:
        ValueError: Nothing loadable is there, or it is no decoder-only language model.
    """
    loaded = load_pretrained(AutoModelForCausalLM, model, argument) if isinstance(model, str | os.PathLike) else model
    _check_transformers_model(loaded, argument)
    base = transformers_model(loaded)
    if base.config.is_encoder_decoder or base.get_output_embeddings() is None:
        raise ValueError(
            f"{argument} is a {type(base).__name__}, not a decoder-only language model; load it with "
            "AutoModelForCausalLM.from_pretrained"
        )
    return loaded


def load_scalar_model(
    model: nn.Module | str | os.PathLike[str], argument: str, merges_adapter: bool = True, **kwargs: Any
) -> nn.Module:
    """Return the sequence-classification model itself, or load it with one label from a directory or the hub.

    Args:
        model: The model, a directory, or a hub name.
        argument: What the caller's argument is called, for error messages.
        merges_adapter: Whether an adapter in a directory is merged into the base that it names.
        **kwargs: For `from_pretrained`.

    Raises:
        ValueError: Nothing loadable is there, or the model has no, or more than one, output.
    """
    model = load_classifier(model, argument, merges_adapter, num_labels=1, **kwargs)
    check_one_label(model, argument)
    return model


def load_reward_model(
    model: nn.Module | str | os.PathLike[str],
    argument: str,
    label: str | None,
    merges_adapter: bool = True,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Return a reward model with one label: its only one, or the one to keep.

    Args:
        model: The model, a directory, or a hub name.
        argument: What the caller's argument is called, for error messages.
        label: Name or position of the label to keep; None for a model that has but one.
        merges_adapter: Whether an adapter in a directory is merged into its base; always where a label is chosen.
        trust_remote_code: Whether to run code that comes with it.

    Raises:
        ValueError: Nothing loadable is there, the model has no such label, or several and `label` is None.
    """
    if label is None:
        return load_scalar_model(model, argument, merges_adapter, trust_remote_code=trust_remote_code)
    model = load_classifier(model, argument, trust_remote_code=trust_remote_code)
    label_index(transformers_model(model).config, label)
    if num_labels(model) > 1:
        model = keep_label(_without_adapters(model, argument), label)
    check_one_label(model, argument)
    return model


def load_classifier(
    model: nn.Module | str | os.PathLike[str], argument: str, merges_adapter: bool = True, **kwargs: Any
) -> nn.Module:
    """Return the sequence-classification model itself, or load it.

    Args:
        model: The model, a directory, or a hub name.
        argument: What the caller's argument is called, for error messages.
        merges_adapter: Whether an adapter in a directory is merged into the base that it names.
        **kwargs: For `from_pretrained`.

    Raises:
        TypeError: It is no model.
        ValueError: Nothing loadable is there, or weights that score are not.
    """
    if isinstance(model, str | os.PathLike):
        is_whole = argument != "value_model" and not is_adapter_directory(model)  # a value model may start anew
        options = {"output_loading_info": True, **kwargs} if is_whole else kwargs
        loaded: Any = load_pretrained(AutoModelForSequenceClassification, model, argument, **options)
        if is_whole:
            loaded, info = loaded
            _check_has_head(loaded, info["missing_keys"], model, argument)
        whole: nn.Module = _without_adapters(loaded, argument) if merges_adapter else loaded
        model = whole
    _check_transformers_model(model, argument)
    return model


def check_value_model(model: nn.Module) -> None:
    """Check that the value model gives one number per token.

    Raises:
        ValueError: It pools over the text, as encoders do.
    """
    if not reads_last_token(model):
        raise ValueError(
            f"value_model is a {type(transformers_model(model)).__name__}, whose head does not read single tokens; "
            "pass a causal AutoModelForSequenceClassification, or value_model=None to make one from the policy"
        )


def make_value_model(policy: nn.Module, reward_model: nn.Module | None) -> nn.Module:
    """Make a value model: a trainable copy of the reward model if it can serve, else of the policy's backbone.

    The copy of the backbone gets a zero head, so that every value starts at 0.

    Args:
        policy: The policy.
        reward_model: The reward model, or None.

    Returns:
        A float32 model with a per-token scalar head, without adapters.

    Raises:
        ValueError: What it would be made from is quantized, or its architecture has no sequence-classification class.
    """
    original = reward_model if reward_model is not None and reads_last_token(reward_model) else policy
    if _is_quantized(original):
        raise ValueError("value_model=None, but what it would be made from is quantized; pass value_model")
    if is_peft_model(original) and is_sharded(original):
        raise ValueError(
            "value_model=None, but what it would be made from is a PeftModel that ZeRO-3 has sharded, whose adapter "
            "cannot be merged; pass value_model"
        )
    if original is reward_model:
        return _without_adapters(copy_model(original), "value_model").float().train().requires_grad_(True)
    source = _without_adapters(copy.deepcopy(original), "value_model") if is_peft_model(original) else original
    value_model = empty_classifier(source)
    if type(backbone(value_model)) is not type(backbone(source)) or scalar_head(value_model) is None:
        raise ValueError(
            f"value_model=None, but {type(value_model).__name__}, the sequence classifier that transformers has for "
            f"{type(source).__name__}, is built otherwise; pass value_model"
        )
    copy_weights(backbone(source), backbone(value_model))
    head = weight_of(head_of_scorer(value_model))
    with gathered([head], modify=True):
        nn.init.zeros_(head)
    return value_model.to(next(source.parameters()).device).train()


def init_normal_head(value_model: nn.Module, seed: int) -> None:
    """Draw the weights of a value model's head, of `d` inputs, from a normal distribution of std `1 / sqrt(d + 1)`.

    N+ implementation details, 2403.17031, section 4. All processes draw the same, and no other random numbers.

    Args:
        value_model: A model with a per-token scalar head.
        seed: Of the draw.
    """
    head = weight_of(head_of_scorer(value_model))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), gathered([head], modify=True):
        head.copy_(torch.randn(head.shape, generator=generator) / math.sqrt(head.shape[-1] + 1))


def empty_classifier(model: nn.Module) -> nn.Module:
    """Make a float32 classifier with one label of the same architecture as a language model, with new weights.

    Args:
        model: The language model, or a `PeftModel` around one.

    Raises:
        ValueError: The architecture has no sequence-classification class.
    """
    config = copy.deepcopy(transformers_model(model).config)
    config.num_labels = 1
    try:
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise ValueError(
            "value_model=None, but transformers has no sequence-classification class for "
            f"{type(transformers_model(model)).__name__}; pass value_model"
        ) from error


def prepare_trainable(policy: nn.Module, value_model: nn.Module) -> None:
    """Check that the optimizer can change the weights, and let rows be packed.

    Raises:
        ValueError: A model is quantized and has no adapter, or nothing of it is trainable.
    """
    for argument, model in (("model", policy), ("value_model", value_model)):
        if _is_quantized(model) and not is_peft_model(model):
            raise ValueError(
                f"{argument} is quantized, and quantized weights cannot be trained: load it without "
                "quantization_config, or train an adapter over it (peft_config for the policy)"
            )
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(
                f"{argument} holds an adapter that transformers has loaded, which it neither trains nor tells apart; "
                "load it with peft.PeftModel.from_pretrained(base, ..., is_trainable=True), or merge it"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(f"no parameter of {argument} is trainable; call {argument}.requires_grad_(True)")
        pack_rows(model)
        model.train()


def check_runs_on(model: nn.Module, argument: str, device: torch.device) -> None:
    """Check that a model that bitsandbytes has quantized is on CUDA.

    Args:
        model: The model.
        argument: What the caller's argument is called, for the error message.
        device: Where the run is.

    Raises:
        ValueError: It would run elsewhere.
    """
    base = transformers_model(model)
    bits = 4 if getattr(base, "is_loaded_in_4bit", False) else 8 if getattr(base, "is_loaded_in_8bit", False) else None
    if bits is not None and device.type != "cuda":
        raise ValueError(
            f"{argument} was loaded in {bits} bits (load_in_{bits}bit=True): bitsandbytes needs a CUDA GPU, but this "
            f"run is on device={str(device)!r}; load it without quantization_config, or run on CUDA"
        )


def _is_quantized(model: nn.Module) -> bool:
    return bool(getattr(transformers_model(model), "is_quantized", False))


def low_precision_parameters(model: nn.Module) -> list[str]:
    """Name the trainable parameters that are stored in 16 bits.

    At PPO's learning rates most of an update is lost in bf16: at 3e-6 about 4% of bf16 parameters change in a step,
    against 98% of float32 ones.
    """
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16)
    ]


def _language_model(path: str | os.PathLike[str], given: str, settings: dict[str, Any]) -> Any:
    """Load a language model, unless its head is not there, which transformers would fill with random numbers."""
    load: Any = AutoModelForCausalLM.from_pretrained
    loaded, info = load(path, output_loading_info=True, **settings)
    head = loaded.get_output_embeddings()
    names = {f"{name}.weight" for name, module in loaded.named_modules() if module is head and head is not None}
    if random := sorted(names & {*info["missing_keys"]}):
        raise ValueError(
            f"{given} is no language model: {random[0]} of {type(loaded).__name__} is not in it and would be random; "
            "pass a directory or name of a model that was saved with its head"
        )
    return loaded


def load_pretrained(auto_class: Any, path: str | os.PathLike[str], argument: str, **kwargs: Any) -> Any:
    """Call `auto_class.from_pretrained`, in float32 unless told otherwise, and put an adapter over its base.

    Args:
        auto_class: One of transformers' auto classes of models.
        path: A directory, or a hub name.
        argument: What the caller's argument is called, for error messages.
        **kwargs: For `from_pretrained`.

    Returns:
        What `from_pretrained` returned; a directory with an adapter gives a `PeftModel`.

    Raises:
        ValueError: Nothing loadable is there; names the argument and the reason.
    """
    given = f"{argument}={os.fspath(path)!r}"
    if os.path.isdir(path) and not _has_config(path):
        raise ValueError(
            f"{given} is a directory without a model: it has no config.json or adapter_config.json; pass a directory "
            "written by save_pretrained or save_model"
        )
    kwargs = {"trust_remote_code": False, **kwargs}  # None would ask on stdin
    if is_adapter_directory(path):
        return load_adapter(load_pretrained(auto_class, base_of_adapter(path), argument, **kwargs), path)
    try:
        with bars_of_models_on_terminals():
            if auto_class is AutoModelForCausalLM:
                return _language_model(path, given, {"dtype": torch.float32, **kwargs})
            return auto_class.from_pretrained(path, **{"dtype": torch.float32, **kwargs})
    except torch.OutOfMemoryError:
        raise
    except OSError as error:
        reason = f"its files cannot be read: {error}" if os.path.isdir(path) else (
            "it is neither a directory with a model nor a model that the hub gave"
        )  # fmt: skip
        raise ValueError(f"{given} could not be loaded: {reason}") from error
    except SafetensorError as error:
        raise ValueError(f"{given} could not be loaded: its weights are damaged ({error}); save it anew") from error
    except ImportError as error:  # of what its quantization needs
        raise ValueError(f"{given} needs a package that is not installed: {error}") from error
    except (ValueError, RuntimeError) as error:  # another kind of model, or another number of labels
        if str(error).startswith(given):
            raise
        raise ValueError(_of_another_kind(given, auto_class, argument, kwargs, error)) from error


def _of_another_kind(given: str, auto_class: Any, argument: str, settings: dict[str, Any], error: Exception) -> str:
    if wants_code(error):
        return f"{given} {CODE_IS_RUN_IF}"
    labels = ", ".join(f"{name}={value}" for name, value in settings.items() if name == "num_labels")
    refusal = f"{given} cannot be loaded with {auto_class.__name__}.from_pretrained({labels}): {error!s:.600}"
    return refusal + ("; of several labels reward_head takes one" if "reward" in argument else "")


CODE_IS_RUN_IF = (
    "comes with Python code of its own, which is not run: read it, and allow it by --trust_remote_code, or in Python "
    "by loading the model yourself with trust_remote_code=True"
)
"""What is said of a model, or a tokenizer, whose code may not be run."""


def wants_code(error: Exception) -> bool:
    """Tell whether transformers has refused to run the code that comes with a model."""
    return "trust_remote_code" in str(error)


def _check_has_head(model: nn.Module, missing: Iterable[str], path: str | os.PathLike[str], argument: str) -> None:
    if missing := sorted(missing):
        raise ValueError(
            f"{argument}={os.fspath(path)!r} is no reward model: {', '.join(missing)} of {type(model).__name__} would "
            "be random; train one with `rlhf-ppo reward`, or save one with AutoModelForSequenceClassification"
        )


def _has_config(path: str | os.PathLike[str]) -> bool:
    return any(os.path.isfile(os.path.join(path, name)) for name in ("config.json", "adapter_config.json"))


def _check_transformers_model(model: Any, argument: str) -> None:
    if not isinstance(model, nn.Module) or not isinstance(transformers_model(model), PreTrainedModel):
        raise TypeError(
            f"{argument} must be a transformers model, a PeftModel, a directory or a hub name, got "
            f"{type(model).__name__}"
        )


def _without_adapters(model: nn.Module, argument: str) -> nn.Module:
    """Merge a model's adapter, if it has one, into its base."""
    if not is_peft_model(model):
        return model
    try:
        return model.merge_and_unload()
    except Exception as error:  # each kind has errors of its own
        raise ValueError(
            f"PEFT cannot merge an adapter of the kind {adapter_kind(model)} into its base ({error}); pass {argument} "
            "as a whole model"
        ) from error
