"""Loading of models from objects, directories or hub names; value models."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from rlhf_ppo.models.adapters import (
    ADAPTER_DIRECTORY,
    LOADED,
    MERGED,
    adapter_config,
    base_of_adapter,
    is_adapter_directory,
    load_adapter,
    merged_in_place,
    trained_but_not_saved,
    unties_embeddings,
)
from rlhf_ppo.models.heads import ValueHead, reads_last_token
from rlhf_ppo.models.packing import pack_rows
from rlhf_ppo.models.unwrapping import (
    as_module,
    backbone,
    copy_model,
    copy_weights,
    fix_outputs,
    gathered,
    is_peft_model,
    output_layer,
    transformers_model,
    without_wrapper,
)
from rlhf_ppo.models.value_model import AutoClassifier, TRLModel, new_value_model
from rlhf_ppo.ranks.processes import get_logger

if TYPE_CHECKING:
    from peft import PeftConfig

logger = get_logger(__name__)

CHECKPOINT_DTYPE = "checkpoint_dtype"
"""Attribute of a language model loaded from a path: the type of its files, in which the trained policy is saved."""

NOT_HERE = "is not a directory, and the hub does not provide it"
"""Reason of a name that cannot be loaded."""

# ---- Loading ----


def load_policy(model: nn.Module | str | os.PathLike[str], argument: str, adapter: str | None = None) -> nn.Module:
    """Return the causal language model itself, or load it from a directory or the hub, in float32.

    A directory with an adapter gives a `PeftModel` over the base that the adapter names.

    Args:
        model: The model, a directory, or a hub name.
        argument: Name of the caller's argument, for error messages.
        adapter: Name of the adapter that is used; None: the active one.

    Raises:
        ValueError: It cannot be loaded, is not a decoder-only language model, or has a reward model's adapter.
    """
    loaded = load_pretrained(AutoModelForCausalLM, model, argument) if isinstance(model, str | os.PathLike) else model
    if is_peft_model(loaded):
        used = loaded.peft_config.get(adapter or "", loaded.active_peft_config)
        check_no_scorer(used, argument, f"{argument} has")
    base = transformers_model(loaded)
    is_wrapper = not hasattr(base, "get_output_embeddings")  # TRL's with a value head
    if is_wrapper or base.config.is_encoder_decoder or base.get_output_embeddings() is None:
        raise ValueError(
            f"{argument} is a {type(base).__name__}, not a decoder-only language model; load it with "
            "AutoModelForCausalLM.from_pretrained"
        )
    fix_outputs(loaded)
    return loaded


def load_classifier(
    model: nn.Module | str | os.PathLike[str],
    argument: str,
    merges_adapter: bool = True,
    is_value_model: bool = False,
    **kwargs: object,
) -> nn.Module:
    """Return the reward or value model itself, or load it; it gives one number per text or token.

    Args:
        model: The model, a directory, or a hub name.
        argument: Name of the caller's argument, for error messages.
        merges_adapter: Merge an adapter in a directory into its base.
        is_value_model: The model is trained: its head may be new, and an adapter that transformers has loaded is
            merged.
        **kwargs: For `from_pretrained`.

    Raises:
        ValueError: It cannot be loaded, has no weights of a head, or has several labels.
    """
    if isinstance(model, str | os.PathLike):
        if is_adapter_directory(model):
            loaded = _adapted_classifier(model, argument, may_get_a_head=is_value_model, num_labels=1, **kwargs)
        else:
            loaded, info = load_pretrained(
                AutoModelForSequenceClassification, model, argument, num_labels=1, output_loading_info=True, **kwargs
            )
            missing = ", ".join(sorted(info["missing_keys"]))
            if missing and not is_value_model:
                raise ValueError(
                    f"{argument}={os.fspath(model)!r} is not a reward model: {missing} of {type(loaded).__name__} "
                    "would be random; train one with `rlhf-ppo reward`, or save one with "
                    "AutoModelForSequenceClassification"
                )
        model = without_adapters(loaded) if merges_adapter else as_module(loaded)
    elif not isinstance(model, PreTrainedModel) and not is_peft_model(model):
        if not (hasattr(model, "base_model_prefix") and hasattr(model, "score")):
            raise ValueError(
                f"{argument} is a {type(model).__name__}: pass an AutoModelForSequenceClassification, or a module "
                "with base_model_prefix and score (TRL's interface)"
            )
        model = TRLModel(model)
    fix_outputs(model)
    base = transformers_model(model)
    if base.config.num_labels != 1:
        raise ValueError(
            f"{argument} is a {type(base).__name__} with num_labels={base.config.num_labels}, but a {argument} gives "
            "one number per text: load it with AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
        )
    return without_adapters(model) if is_value_model and getattr(model, LOADED, False) else model


def check_value_model(model: nn.Module) -> None:
    """Check that the value model gives one number per token.

    Raises:
        ValueError: It pools over the text.
    """
    if not reads_last_token(model):
        raise ValueError(
            f"value_model is a {type(transformers_model(model)).__name__}, whose head does not read single tokens; "
            "pass a causal AutoModelForSequenceClassification, or value_model=None to make one from the policy"
        )


def make_value_model(original: nn.Module) -> nn.Module:
    """Make a value model: a trainable copy of a causal reward model, or of a policy's backbone with a zero head.

    Args:
        original: The reward model, or the policy.

    Returns:
        A float32 model with a per-token scalar head, without adapters.

    Raises:
        ValueError: The original is quantized: its weights are codes.
    """
    if is_quantized(original):
        raise ValueError(
            f"value_model=None would be a copy of the quantized {type(transformers_model(original)).__name__}, which "
            "cannot be trained: set share_base_model=True or value_model='policy', or pass a value model"
        )
    if reads_last_token(original):
        return without_adapters(copy_model(original)).float().train().requires_grad_(True)
    source = original
    if is_peft_model(original):
        with gathered(original.parameters()):  # ZeRO-3's shards are not copied
            source = without_adapters(copy.deepcopy(original))
    value_model: Any = new_value_model(source)
    setattr(value_model, MERGED, getattr(source, MERGED, False))
    copy_weights(backbone(source), backbone(value_model))
    with gathered([value_model.score.weight], modify=True):
        nn.init.zeros_(value_model.score.weight)
    return value_model.to(next(source.parameters()).device).train()


def prepare_trainable(policy: nn.Module, value_model: nn.Module) -> None:
    """Check that the optimizer can change the weights; pack rows.

    Raises:
        ValueError: A model is quantized and has no adapter, or has no trainable parameter.
    """
    for argument, model in (("model", policy), ("value_model", value_model)):
        fault = None
        if is_quantized(model) and not is_peft_model(model):
            fault = (
                "is quantized, and quantized weights cannot be trained: load it without quantization_config, or train "
                "an adapter over it (peft_config for the policy)"
            )
        elif getattr(model, LOADED, False):
            fault = (
                "holds an adapter that transformers has loaded, which cannot be trained or separated: pass the "
                f"adapter's directory as {argument}, or a peft.PeftModel with is_trainable=True"
            )
        elif not any(parameter.requires_grad for parameter in model.parameters()):
            fault = f"has no trainable parameter; call {argument}.requires_grad_(True)"
        elif (weight := trained_but_not_saved(model)) is not None:
            fault = (
                f"trains {weight}, which PEFT does not save with the adapter: freeze it, or name its module in the "
                "adapter's modules_to_save"
            )
        if fault is not None:
            raise ValueError(f"{argument} {fault}")
        if not isinstance(model, ValueHead):
            pack_rows(model)
        model.train()


def is_quantized(model: nn.Module) -> bool:
    """Return whether a model, or the base of its adapter, is stored in 4 or 8 bits."""
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


def load_pretrained(auto_class: Any, path: str | os.PathLike[str], argument: str, **kwargs: object) -> Any:
    """Call `auto_class.from_pretrained`, by default in float32; load an adapter over its base.

    Args:
        auto_class: One of transformers' auto classes of models.
        path: A directory, or a hub name.
        argument: Name of the caller's argument, for error messages.
        **kwargs: For `from_pretrained`.

    Returns:
        The result of `from_pretrained`; a `PeftModel` for a directory with an adapter.

    Raises:
        ValueError: It cannot be loaded; names the argument and the reason.
    """
    kwargs = {"trust_remote_code": False, **kwargs}  # None would ask on stdin
    if is_adapter_directory(path):
        if (revision := adapter_config(path).revision) is not None:  # of the base
            kwargs["revision"] = revision
        if auto_class is AutoModelForSequenceClassification:
            return _adapted_classifier(path, argument, may_get_a_head=False, **kwargs)
        check_no_scorer(adapter_config(path), argument, f"{argument}={os.fspath(path)!r} is")
        return load_adapter(load_pretrained(auto_class, base_of_adapter(path), argument, **kwargs), path)
    is_language_model = auto_class is AutoModelForCausalLM
    if auto_class is AutoModelForSequenceClassification:
        auto_class = AutoClassifier
    loads_weights, with_info = auto_class is not AutoConfig, kwargs.pop("output_loading_info", False)
    checks = {"output_loading_info": True, "ignore_mismatched_sizes": True} if loads_weights else {}
    settings = {"dtype": torch.float32, **kwargs, **checks}
    passed = f"{argument}={os.fspath(path)!r}"
    of_files = {name: kwargs[name] for name in ("revision", "trust_remote_code") if name in kwargs}
    config = None
    try:
        if is_language_model:
            config = AutoConfig.from_pretrained(path, **of_files)
            auto_class = _class_it_was_saved_as(config)
        loaded = auto_class.from_pretrained(path, **settings)
    except (OSError, ValueError) as error:
        raise ValueError(f"{passed} {why_not_loaded(error, path, 'cannot be loaded')}") from error
    if not loads_weights:
        return loaded
    loaded, info = loaded
    if (fault := _fault_of_files(loaded, info, config)) is not None:
        raise ValueError(f"{passed} {fault}")
    if config is not None:
        setattr(loaded, CHECKPOINT_DTYPE, config.dtype)
    return (loaded, info) if with_info else loaded


def check_no_scorer(adapter: PeftConfig, argument: str, what: str) -> None:
    """Check that a policy's adapter is not one of a reward or value model, as which it would be saved again.

    Args:
        adapter: Its configuration.
        argument: The argument that takes a policy.
        what: Start of the message, such as `model has`.

    Raises:
        ValueError: It is one.
    """
    for kind in ("SEQ_CLS", "TOKEN_CLS"):
        if adapter.task_type == kind:
            raise ValueError(
                f"{what} an adapter of a reward model (task_type {kind}): pass it as reward_model, and an SFT model "
                f"as {argument}"
            )


def _fault_of_files(
    loaded: PreTrainedModel, info: Mapping[str, Any], language_model: PreTrainedConfig | None
) -> str | None:
    """Return why weights that a model needs would be random, or None; a classifier may get a new head.

    Args:
        loaded: The model.
        info: What transformers says about its weights.
        language_model: The configuration in the files of a language model; None for a classifier.
    """
    is_language_model, saved_as = language_model is not None, getattr(language_model, "architectures", None) or []
    if saved_as and all(name.endswith(("ForSequenceClassification", "ForTokenClassification")) for name in saved_as):
        return (
            f"is a reward model ({saved_as[0]}), not a language model: pass it as reward_model, and name the model "
            "that it was trained from"
        )
    for weight, shape, needed in info["mismatched_keys"]:
        fault = f"holds {weight} of the shape {(*shape,)}, where {type(loaded).__name__} needs {(*needed,)}"
        has_other_labels = not is_language_model and shape[1:] == needed[1:]
        return f"{fault}: it has {shape[0]} labels, but one number per text is needed" if has_other_labels else fault
    names = {f"{name}.weight" for name, part in loaded.named_modules() if part is loaded.get_output_embeddings()}
    if is_language_model and (random := sorted(names & {*info["missing_keys"]})):
        return (
            f"is not a language model: {random[0]} of {type(loaded).__name__} is not in it and would be random; pass "
            "a directory or name of a model that was saved with its head"
        )
    return None


def _class_it_was_saved_as(config: PreTrainedConfig) -> Any:
    """Return the auto class with which a language model keeps its vision tower, if it has one."""
    reads_images: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    is_llama4 = config.model_type == "llama4"  # whose class reads an output that transformers 5.24 does not give
    if reads_images is not None and reads_images.__name__ in (config.architectures or ()) and not is_llama4:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def load_processor(
    processing_class: object, policy: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> ProcessorMixin | None:
    """Return the processor that came with a policy of images and text, to save it again; else None."""
    if isinstance(processing_class, ProcessorMixin):
        return processing_class
    config = transformers_model(policy).config
    if config.get_text_config() is config or not config._name_or_path:
        return None
    try:
        processor: Any = AutoProcessor.from_pretrained(config._name_or_path)
    except Exception as error:  # it may need packages that texts do not
        logger.warning(f"The policy's processor cannot be loaded, nor saved with the policy: {error!s:.300}")
        return None
    if not isinstance(processor, ProcessorMixin):
        return None
    processor.tokenizer = tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    if tokenizer.chat_template is not None:  # with which the prompts are rendered
        processor.chat_template = tokenizer.chat_template  # pyright: ignore[reportAttributeAccessIssue]
    return processor


def _adapted_classifier(
    path: str | os.PathLike[str], argument: str, may_get_a_head: bool, **settings: object
) -> nn.Module:
    """Load a classifier's adapter over its base; `may_get_a_head`: a head that neither has is new, not an error."""
    from peft import load_peft_weights

    base = base_of_adapter(path)
    of_files = logging.getLogger("transformers.modeling_utils")
    level = of_files.level
    of_files.setLevel(logging.ERROR)  # its report would say that the head is missing
    try:
        model, info = load_pretrained(
            AutoModelForSequenceClassification, base, argument, output_loading_info=True, **settings
        )
    finally:
        of_files.setLevel(level)
    held = load_peft_weights(os.fspath(path), device="cpu")
    random = [name for name in sorted(info["missing_keys"]) if not any(key.endswith(f".{name}") for key in held)]
    if random:
        fault = (
            f"{argument}={os.fspath(path)!r} is an adapter without a head: {random[0]} is neither in it nor in its "
            f"base {os.fspath(base)!r}"
        )
        if not may_get_a_head:
            raise ValueError(
                f"{fault} and would be random; train one with `rlhf-ppo reward --use_peft`, or with "
                "task_type='SEQ_CLS' of PEFT"
            )
        logger.warning(f"{fault}. A new head with random weights is trained.")
    return load_adapter(model, path)


CODE_IS_RUN_IF = (
    "comes with its own Python code, which is not run: read it, and allow it with --trust_remote_code (not in "
    "`init` and `llm`), or in Python by loading the model yourself with trust_remote_code=True"
)
"""Message for a model or tokenizer with code that may not run."""


def wants_code(error: Exception) -> bool:
    """Return whether transformers refused to run a model's code."""
    return "trust_remote_code" in str(error)


def why_not_loaded(error: Exception, path: str | os.PathLike[str], fault: str) -> str:
    """Return the reason why `from_pretrained` has failed; `fault` is that of files which are there."""
    is_missing = isinstance(error, OSError) and not os.path.isdir(path)
    return CODE_IS_RUN_IF if wants_code(error) else f"{NOT_HERE if is_missing else fault}: {error!s:.600}"


def without_adapters(model: nn.Module) -> nn.Module:
    """Merge a model's adapter, if it has one, into its base, whose weights train as those of any whole model.

    If an adapter changes tied embeddings and head separately, both get their own weights first.
    Under ZeRO-3 each rank holds the whole model meanwhile.
    """
    if not is_peft_model(model) and not getattr(model, LOADED, False):
        return model
    with gathered(model.parameters(), modify=True):
        if unties_embeddings(model):
            _untie_embeddings(transformers_model(model))
        if is_peft_model(model):
            merged: nn.Module = model.merge_and_unload()  # pyright: ignore[reportAssignmentType]
        else:
            merged = merged_in_place(model)
    setattr(merged, MERGED, True)
    for parameter in merged.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return merged


def _untie_embeddings(model: PreTrainedModel) -> None:
    head: Any = without_wrapper(output_layer(model))
    head.weight = nn.Parameter(head.weight.detach().clone())
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


# ---- What a directory holds ----

CRITIC_DIR = "critic"
"""Directory of the value model beside the policy, with `save_critic`."""

_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors*", "pytorch_model*.bin*"),
    *("adapter_config.json", "adapter_model.*", "value_head.safetensors"),
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template.*", "additional_chat_templates/*", "*processor_config.json"),
)
"""Files that mark a directory with a model, an adapter, a head, a tokenizer, a template or a processor."""


def remove_saved_models(directory: str | os.PathLike[str]) -> None:
    """Remove what an earlier save has left in a directory and its `critic`: it would be loaded with the new files.

    Args:
        directory: Where a model is saved next. Files of other kinds stay.
    """
    critic = Path(directory, CRITIC_DIR)
    for folder, names in ((Path(directory), _FILES), (critic, (*_FILES, "README.md"))):
        for path in [path for name in names for path in folder.glob(name)]:
            path.unlink()
    with suppress(OSError):  # it is not there, or holds other files
        critic.rmdir()


def starts_of(models: Iterable[nn.Module]) -> dict[str, str]:
    """Return the directories, or hub names, that models were loaded from, and what is there.

    Args:
        models: The models that a run loads, with adapters or without.
    """
    starts = {}
    for model in models:
        base = transformers_model(model)
        what = "the base of the trained adapter" if is_peft_model(model) else "the model that the run starts from"
        roles = {"name_or_path": what, ADAPTER_DIRECTORY: "the adapter that the run starts from"}
        for attribute, role in roles.items():
            if start := getattr(base, attribute, None):
                starts.setdefault(start, role)
    return starts


def check_start_elsewhere(starts: Mapping[str, str], directory: str) -> None:
    """Check that saving does not replace a model that the run starts from, which a resumed run loads again.

    Args:
        starts: What `starts_of` returned.
        directory: Where the trained models are saved.

    Raises:
        ValueError: One of them is there or in the directory's `critic`.
    """
    replaced = [os.path.realpath(path) for path in (directory, os.path.join(directory, CRITIC_DIR))]
    for start, role in starts.items():
        if os.path.realpath(start) in replaced:
            raise ValueError(
                f"output_dir={directory!r}: saving there would replace {start!r}, {role}; choose another output_dir"
            )
