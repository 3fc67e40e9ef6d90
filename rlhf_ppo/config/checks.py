"""Checks of a run's arguments: values, names, what PPO cannot use, and arguments that depend on others.

An error names the argument, its value and its range; for an argument that does not exist, it names the one to use
instead.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NoReturn,
    Self,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
import yaml
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_xla_available

from rlhf_ppo.terminal import redacted, visible_logger

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainingArguments


logger = visible_logger(__name__)

EngineName = Literal["transformers", "continuous", "vllm"]
"""The engines that `rlhf_ppo.generation.engine_factory.make_engine` makes."""


def option(default: object, help: str, **argparse: object) -> Any:
    """Return a dataclass field with a default and the text that `--help` shows."""
    return field(default=default, metadata={"help": help, **argparse})


class Interval(NamedTuple):
    """The finite numbers from `low` to `high`.

    Attributes:
        low: Smallest number.
        high: Largest number; infinity for no limit.
        open_low: Whether `low` itself is excluded.
        open_high: Whether `high` itself is excluded.
    """

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """Return whether `value` is a finite number and lies inside."""
        if not isinstance(value, Real):
            return False
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        if self.low == -math.inf and self.high == math.inf:
            return "finite"
        low, high = (str(end) if isinstance(end, int) else f"{end:g}" for end in (self.low, self.high))
        start = f"{'greater than' if self.open_low else 'at least'} {low}"
        if self.high == math.inf:
            return f"finite and {start}"
        if self.high == FLOAT32_LARGEST and self.low != -FLOAT32_LARGEST:
            return f"{start} and at most {high}"
        return f"in {'(' if self.open_low else '['}{low}, {high}{')' if self.open_high else ']'}"


FLOAT32_LARGEST = 1e38
"""Limit of numbers that are used in float32, whose largest number is 3.4e38."""

WEIGHTS = Interval(-FLOAT32_LARGEST, FLOAT32_LARGEST)
"""The weights that a reward may have."""

LONGEST_WAIT = 1e6
"""Limit of a timeout in seconds: eleven days; some systems support no more than 49."""

_FROM_ZERO, _FROM_ONE = Interval(0, math.inf), Interval(1, math.inf)
_SEEDS = Interval(0, 2**32 - 1)  # as NumPy requires

Finite = Annotated[float, WEIGHTS]
Positive = Annotated[float, Interval(0, FLOAT32_LARGEST, open_low=True)]
NotNegative = Annotated[float, Interval(0, FLOAT32_LARGEST)]
AtLeastOneFloat = Annotated[float, Interval(1, FLOAT32_LARGEST)]
Share = Annotated[float, Interval(0, 1)]
PositiveShare = Annotated[float, Interval(0, 1, open_low=True)]
ShareBelowOne = Annotated[float, Interval(0, 1, open_high=True)]
Count = Annotated[int, _FROM_ZERO]
AtLeastOne = Annotated[int, _FROM_ONE]
Port = Annotated[int, Interval(1, 65535)]
Seed = Annotated[int, _SEEDS]
Temperature = Annotated[float, Interval(1e-3, 1e3)]  # beyond, rounding to float32 decides the log-probabilities


def ranges_of(dataclass: type) -> dict[str, Interval]:
    """Return the range of each field whose annotation holds one, such as `AtLeastOne | None`."""
    ranges = {name: _range_in(hint) for name, hint in get_type_hints(dataclass, include_extras=True).items()}
    return {name: interval for name, interval in ranges.items() if interval is not None}


def _range_in(hint: Any) -> Interval | None:
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    return next(filter(None, map(_range_in, get_args(hint))), None)


def check_ranges(args: Any, ranges: Mapping[str, Interval]) -> None:
    """Check the numbers of a dataclass; see `check_range`.

    Args:
        args: The dataclass.
        ranges: Range of each checked field.

    Raises:
        ValueError: One is outside.
    """
    helps = {item.name: str(item.metadata.get("help", "")) for item in fields(args)}
    for name, interval in ranges.items():
        check_range(name, getattr(args, name), interval, helps[name])


def check_range(name: str, value: float | None, interval: Interval, meaning: str) -> None:
    """Raise unless `value` is None or inside `interval`.

    Args:
        name: Name of the argument.
        value: Its value.
        interval: Its range.
        meaning: Its help text, for the end of the message.

    Raises:
        ValueError: It is outside, infinite or NaN.
    """
    if value is not None and not interval.holds(value):
        raise ValueError(f"{name}={value!r} must be {interval}. {name}: {meaning}")


def python_number(value: Any) -> Any:
    """Convert NumPy numbers, fractions and similar to Python numbers, which JSON supports; return others unchanged."""
    if type(value) in (bool, int, float) or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value)


def check_type(name: str, value: object, annotation: object, meaning: str) -> None:
    """Raise unless `value` matches `annotation`; an integer matches float, a bool matches neither int nor float.

    Args:
        name: Name of the argument.
        value: Its value.
        annotation: A class, a `Literal`, a `list[...]`, a `dict[..., ...]` or a union of them.
        meaning: Its help text, for the end of the message.

    Raises:
        TypeError: It has another type.
        ValueError: It is not one of the literals.
    """
    if _matches(value, annotation):
        return
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    if choices:
        none = [None] if types.NoneType in options else []
        raise ValueError(f"{name}={redacted(value, name)!r} must be one of {choices + none}. {name}: {meaning}")
    expected = " or ".join((option.__name__ if isinstance(option, type) else str(option)) for option in options)
    raise TypeError(
        f"{name}={redacted(value, name)!r} is not {expected.replace('NoneType', 'None')}. {name}: {meaning}"
    )


def parse_weights(value: Any) -> Any:
    """Parse `reward_weights` that are given as text: a JSON list or object, or numbers of a command line.

    Args:
        value: `[1.0, 0.5]`, `{"first": 1.0}`, the JSON text of either, a list that holds only such a text, or a list
            of numbers written as text. Any other value is returned unchanged, for `check_type`.

    Returns:
        A list or a dict.

    Raises:
        TypeError: A weight is not a number.
        ValueError: The text cannot be read, there is no weight, or a weight is out of range.
    """
    written = value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        is_json = len(value) == 1 and value[0].lstrip()[:1] in ("[", "{")
        value = value[0] if is_json else f"[{', '.join(value)}]"
    if isinstance(value, str):
        value = _json(value)
    if isinstance(written, list | dict | str) and not (isinstance(value, list | dict) and value):
        raise ValueError(
            f"reward_weights={written!r:.200} cannot be read; write one number for each reward, a JSON list such as "
            """'[1.0, 0.5]', or a JSON object such as '{"length": 0.5}'"""
        )
    if isinstance(value, list):
        return [_weight(f"reward_weights[{index}]", weight) for index, weight in enumerate(value)]
    if isinstance(value, dict):
        return {key: _weight(f"reward_weights[{key!r}]", weight) for key, weight in value.items()}
    return value


def _weight(name: str, number: object) -> float:
    weight, meaning = python_number(number), "the factor of a reward in the score; 0 for a reward that is only logged"
    check_type(name, weight, float, meaning)
    check_range(name, weight, WEIGHTS, meaning)
    return weight


def parse_strings(name: str, value: Any) -> Any:
    r"""Parse a list of texts that is given as JSON text, alone or in a list, or as a single text.

    Args:
        name: Name of the argument.
        value: `["\n", "END"]`, its JSON text, a list that holds only such a text, or one text. Any other value is
            returned unchanged, for `check_type`.

    Returns:
        A list.

    Raises:
        ValueError: There is no text, or a text is empty or has U+FFFD, the decoders' mark of an incomplete character,
            or a backslash with n, t or r in place of a line break or tab.
    """
    written = value
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], str):
        decoded = _json(texts[0])
        texts = decoded if isinstance(decoded, list) else texts
    if isinstance(texts, list) and (not texts or any(text == "" or "\ufffd" in str(text) for text in texts)):
        raise ValueError(f"{name}={written!r} must hold non-empty texts without U+FFFD; use None for none")
    for text in texts if isinstance(texts, list) else ():
        if escape := re.search(r"\\[ntr](?![a-z])", str(text)):  # not the start of a command such as \right
            raise ValueError(
                f"""{name}={written!r} holds a backslash and the letter {escape[0][1]}, not a line break or tab: """
                """write a line break in JSON, '["\\n"]', or in Python ["\\n"]"""
            )
    return texts


def _json(text: str) -> Any:
    """Parse a JSON text; return None if it is not JSON."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):  # or it is nested a thousand deep
        return None


def parse_object(name: str, value: object, example: str) -> dict[str, Any] | None:
    """Return a dict that may be given as JSON text; None stays None.

    Args:
        name: Name of the argument.
        value: The dict or its text.
        example: A valid text, for the error message.

    Raises:
        TypeError: It is neither.
    """
    if value is None:
        return None
    content = _json(value) if isinstance(value, str) else value
    if not isinstance(content, Mapping):
        raise TypeError(
            f"{name}={redacted(value)!r:.80} must be a dict or the JSON text of an object, such as {example}"
        )
    return dict(content)


def _matches(value: object, annotation: Any) -> bool:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_matches(value, option) for option in arguments)
    if annotation is Any:
        return True
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_matches(item, arguments[0]) for item in value)
    if origin is dict:
        of_key, of_value = arguments
        return isinstance(value, dict) and all(_matches(k, of_key) and _matches(v, of_value) for k, v in value.items())
    # NumPy numbers are numbers; bool is an int in Python, but `num_mini_batches=True` is a mistake.
    number = {int: Integral, float: Real}.get(annotation)
    return isinstance(value, number or annotation) and not (number and isinstance(value, bool))


# ---- Strict YAML ----

_BOOL = "tag:yaml.org,2002:bool"


class PlainWords(yaml.SafeLoader):
    """YAML loader that reads `yes`, `no`, `on` and `off` as text, as YAML 1.2 does, and rejects repeated keys."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raise if a key is repeated."""
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"the key {', '.join(twice)} is repeated")
        return super().construct_mapping(node, deep)


PlainWords.add_implicit_resolver(_BOOL, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


# ---- Names that do not exist ----

HINTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("hints.yaml").read_text(encoding="utf-8"))
"""The tables of advice in `hints.yaml`, by name."""


def _by_name(table: str) -> dict[str, str]:
    """Return the advice of a table of `hints.yaml` by name."""
    return {name: advice for advice, names in HINTS[table].items() for name in names}


REMOVED = _by_name("removed")
"""Argument of the documented signature that transformers no longer has or reads: the alternative."""

CONFIG_HINTS = _by_name("config")
"""Argument of TRL's configurations that `PPOConfig` does not have: the option to use, or why there is none."""

TRAINER_HINTS = _by_name("trainer")
"""Argument of other trainers that `PPOTrainer` does not have: the argument to use, or why there is none."""

METHOD_HINTS = _by_name("method")
"""Attribute of TRL's PPO trainers that `PPOTrainer` does not have, and the line to write instead."""

IMPORT_HINTS = _by_name("import")
"""Name of TRL's that `rlhf_ppo` does not have, and the line to write instead."""


def reject_call(
    trainer: type, args: Sequence[object], kwargs: Mapping[str, object], of_config: Collection[str]
) -> None:
    """Raise for a trainer's arguments in the order, or with the names, of other trainers.

    Args:
        trainer: The trainer's class; one with `**kwargs` takes any name.
        args: Positional arguments.
        kwargs: Named arguments.
        of_config: Names of the options of `PPOConfig`.

    Raises:
        TypeError: A model is first or second, as in TRL 0.11; or a name does not exist.
    """
    owner, known = trainer.__name__, inspect.signature(trainer).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    if any(isinstance(value, str) or hasattr(value, "state_dict") for value in args[:2]):
        raise TypeError(f"{owner} takes args first: write {owner}(args, model=..., processing_class=...)")
    hints = {name: f"in PPOConfig: {hint}" for name, hint in CONFIG_HINTS.items()}
    reject_unknown(owner, kwargs, known, hints | TRAINER_HINTS, dict.fromkeys(of_config, "PPOConfig"))


def reject_search(self: object, *args: object, **kwargs: object) -> NoReturn:
    """Raise in place of `Trainer.hyperparameter_search`, which needs a trainer that makes its models anew."""
    name = type(self).__name__
    raise NotImplementedError(
        f"{name} has no hyperparameter search: train a run with each setting, and compare their eval_score"
    )


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'close'?)` for the known name that is closest; empty if none is close."""
    near = nearest(name, known)
    return "" if near is None else f" (did you mean {near!r}?)"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is closest; None if none is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def hint_for(name: str, known: Collection[str], hints: Mapping[str, str], elsewhere: Mapping[str, str]) -> str:
    """Return advice on an unknown argument: the hint for its name, its right place, or the closest known name.

    Args:
        name: The argument.
        known: Names of the arguments that exist.
        hints: Hints by name.
        elsewhere: For each argument of another class, that class.
    """
    if name in hints:
        return hints[name]
    if name in elsewhere:
        return f"it is an argument of {elsewhere[name]}"
    near = nearest(name, known)
    return "" if near is None else f"did you mean {near!r}?"


def reject_unknown(
    owner: str, names: Iterable[str], known: Collection[str], hints: Mapping[str, str], elsewhere: Mapping[str, str]
) -> None:
    """Raise for arguments that do not exist; see `hint_for`.

    Raises:
        TypeError: There is one; the message lists all, each with its hint.
    """
    advice = {name: hint_for(name, known, hints, elsewhere) for name in names if name not in known}
    if advice:
        listed = ", ".join(f"{name!r} ({hint})" if hint else repr(name) for name, hint in advice.items())
        raise TypeError(f"{owner} got an unexpected keyword argument {listed}")


def reject_removed(names: Iterable[str]) -> None:
    """Raise for names that `TrainingArguments` no longer has.

    Args:
        names: Names of arguments.

    Raises:
        TypeError: One of them is in `REMOVED`; the message names the replacement.
    """
    advice = [f"{name}: {REMOVED[name]}" for name in names if name in REMOVED]
    if advice:
        raise TypeError(f"no longer an argument of transformers.TrainingArguments: {'; '.join(advice)}")


class ExplainsUnknown:
    """Base of a dataclass whose constructor explains removed, foreign and misspelled arguments.

    As a base class, it keeps the signature of the dataclass's constructor.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Check the names of the keyword arguments before `__init__` sees them."""
        known = inspect.signature(cls).parameters
        # In the last versions of transformers that have a removed argument, its default is None.
        reject_removed(name for name, value in kwargs.items() if value is not None or name not in known)
        reject_unknown(cls.__name__, kwargs, known, CONFIG_HINTS, dict.fromkeys(TRAINER_ARGUMENTS, "PPOTrainer"))
        return super().__new__(cls)


TRAINER_ARGUMENTS = (
    *("processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model", "data_collator"),
    *("eval_dataset", "optimizers", "callbacks", "peft_config", "reward_funcs", "reward_processing_classes"),
    *("value_peft_config", "kl_controller", "engine", "ptx_dataset", "tools", "rollout_func", "environment_factory"),
)
"""Arguments of `PPOTrainer` that are not fields of `PPOConfig`."""


# ---- Inherited arguments: each is used, or refused with an alternative ----

REJECTED: dict[str, tuple[object, str]] = {
    name: (accepted, advice) for advice, names in HINTS["rejected"].items() for name, accepted in names.items()
}
"""Rejected argument: its only accepted value, and the reason or an alternative."""

REJECTED_VALUES: dict[str, dict[str, str]] = {
    name: {value: advice for advice, values in table.items() for value in values}
    for name, table in HINTS["rejected_values"].items()
}
"""Accepted argument: values that PPO cannot support, and the reason."""


def reject_unsupported(args: TrainingArguments) -> None:
    """Raise for inherited arguments that PPO does not support.

    Args:
        args: The arguments, before or after `TrainingArguments.__post_init__`.

    Raises:
        ValueError: `REJECTED` or `REJECTED_VALUES` excludes a value.
    """
    problems = [f"{name}={getattr(args, name)!r}: {advice}" for name, advice in _unsupported(args)]
    if problems:
        raise ValueError(f"PPO cannot use {'; '.join(problems)}")


def _unsupported(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    for name, (accepted, advice) in REJECTED.items():
        value = getattr(args, name, accepted)
        if value != accepted or isinstance(value, bool) != isinstance(accepted, bool):
            yield name, advice
    for name, advice_by_value in REJECTED_VALUES.items():
        if getattr(args, name) in advice_by_value:  # transformers' enums are strings too
            yield name, advice_by_value[getattr(args, name)]
    yield from _unsupported_parts(args)
    if args.debug:
        yield "debug", "transformers' hooks do not reach this trainer's loop"
    if args.save_strategy == "best" and args.eval_strategy == "no":
        yield "save_strategy", "it compares evaluations: set eval_strategy to 'steps' or 'epoch'"
    if args.metric_for_best_model in ("loss", "eval_loss"):
        yield "metric_for_best_model", "evaluation has no loss; use 'score'"


def _unsupported_parts(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    config: Any = args.accelerator_config
    if config is None or isinstance(config, str | dict):  # not parsed yet
        return
    if config.split_batches:
        yield "accelerator_config", "drop its split_batches: each process reads per_device_train_batch_size rows"
    if config.dispatch_batches:
        yield "accelerator_config", "drop its dispatch_batches: each process reads its own prompts"
    if not config.even_batches:
        yield "accelerator_config", "drop its even_batches=False: each process needs as many batches as the others"
    if config.gradient_accumulation_kwargs and not reduces_once(args):
        yield "accelerator_config", "drop its gradient_accumulation_kwargs: use gradient_accumulation_steps"
    if not config.use_seedable_sampler:
        yield "accelerator_config", "drop its use_seedable_sampler=False: prompts could not be resumed in their order"


def reduces_once(args: TrainingArguments) -> bool:
    """Return whether FSDP2 keeps whole gradients until the last micro-batch of a step, to exchange them once."""
    kwargs = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    return kwargs | {"num_steps": 1} == {"sync_each_batch": False, "num_steps": 1}  # Trainer adds num_steps


INHERITED_RANGES: dict[str, Interval] = {
    **dict.fromkeys(("num_train_epochs", "ddp_timeout"), Interval(0, math.inf, open_low=True)),
    **dict.fromkeys(("learning_rate", "max_grad_norm", "logging_steps", "weight_decay", "adam_epsilon"), _FROM_ZERO),
    **dict.fromkeys(("warmup_steps", "eval_steps", "save_steps", "eval_delay", "dataloader_num_workers"), _FROM_ZERO),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Interval(0, 1, open_high=True)),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), _FROM_ONE),
    **dict.fromkeys(("gradient_accumulation_steps", "save_total_limit", "torch_empty_cache_steps"), _FROM_ONE),
    **dict.fromkeys(("dataloader_prefetch_factor", "ddp_bucket_cap_mb"), _FROM_ONE),
    **dict.fromkeys(("seed", "data_seed"), _SEEDS),
    **dict.fromkeys(("max_steps", "local_rank"), Interval(-1, math.inf)),
}
"""Range of each numeric argument that `TrainingArguments` has."""


# ---- Arguments that depend on others ----


def check_num_prompts(
    num_prompts: int, batch_size: int, num_generations: int, factors: str, max_prompt_length: int | None
) -> None:
    """Raise a `ValueError` if the training set has fewer prompts than one update.

    Args:
        num_prompts: Prompts of the training set.
        batch_size: Episodes of an update.
        num_generations: Responses to each prompt of an update.
        factors: The factors of the batch size, for the message.
        max_prompt_length: Longer prompts were dropped; None if none were.
    """
    if num_prompts * num_generations < batch_size:
        shared = "" if num_generations == 1 else f" / num_generations={num_generations}"
        dropping = f", or raise max_prompt_length={max_prompt_length}, which drops longer ones"
        raise ValueError(
            f"the training set has {num_prompts} prompts, fewer than the {batch_size // num_generations} of one batch "
            f"({factors}{shared}); lower per_device_train_batch_size or gradient_accumulation_steps, or add prompts"
            f"{'' if max_prompt_length is None else dropping}"
        )


def check_divides(argument: str, number: int, per_device: int, accumulation: int) -> None:
    """Raise a `ValueError` if a process's episodes of an update cannot be split into `number` equal parts."""
    local = per_device * accumulation
    if local % number:
        divisors = [divisor for divisor in range(1, local + 1) if local % divisor == 0]
        raise ValueError(
            f"{argument}={number} does not divide the {local} episodes of a process "
            f"({made_of(per_device, accumulation)}); use one of {divisors}, or change the other two"
        )


def check_total_episodes(total_episodes: int | None, per_device: int, accumulation: int, num_processes: int) -> None:
    """Raise a `ValueError` if a run has fewer episodes than one update."""
    batch_size = per_device * accumulation * num_processes
    if total_episodes is not None and total_episodes < batch_size:
        several = "" if num_processes == 1 else f" x {num_processes} processes"
        raise ValueError(
            f"total_episodes={total_episodes} is less than the {batch_size} episodes of one update "
            f"({made_of(per_device, accumulation)}{several}); raise it, or lower the other two"
        )


def made_of(per_device: int, accumulation: int) -> str:
    """Return the factors of a process's episodes, for messages."""
    return f"per_device_train_batch_size={per_device} x gradient_accumulation_steps={accumulation}"


def check_warmup_length(critic_warmup_steps: int, num_updates: int) -> None:
    """Raise a `ValueError` if critic warm-up lasts for the whole run."""
    if critic_warmup_steps >= num_updates > 0:
        raise ValueError(
            f"critic_warmup_steps={critic_warmup_steps} is the whole run of {num_updates} updates, so the policy "
            "would not learn; lower it"
        )


def launched_precision(args: Any) -> str | None:
    """Return the precision that a launcher set, or None.

    Args:
        args: Gives `bf16` and `fp16`.

    Raises:
        ValueError: One of them contradicts the launcher.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION")
    wanted = "fp16" if args.fp16 else "bf16" if args.bf16 else None if args.bf16 is None else "no"
    if (launched, wanted) in (("bf16", "fp16"), ("bf16", "no"), ("fp16", "bf16")):
        name = "fp16" if args.fp16 else "bf16"
        raise ValueError(
            f"{name}={getattr(args, name)} contradicts the launcher's mixed_precision={launched!r}: give accelerate "
            f"launch --mixed_precision {wanted}, or leave {name} out"
        )
    return launched


def supports_bf16() -> bool:
    """Return whether the accelerator computes in bf16; GPUs before Ampere emulate it, slower than float32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return is_torch_bf16_gpu_available() or is_torch_xla_available()


def choose_bf16(args: TrainingArguments) -> bool:
    """Return `bf16`, or its default if it is not set; rank 0 warns once if its GPU does not support bf16.

    The launcher's bf16 or fp16 decides; its "no" does not, because `accelerate launch` also sets that by default.

    Args:
        args: Gives `bf16`, `fp16` and `use_cpu`; devices need not be set up yet.

    Raises:
        ValueError: `bf16` or `fp16` contradicts the launcher.
    """
    launched, bf16 = launched_precision(args), cast("bool | None", args.bf16)
    on_cpu = args.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    if bf16 is None and (args.fp16 or launched in ("bf16", "fp16")):
        bf16 = launched == "bf16"
    is_first = os.environ.get("RANK", "0") == "0"  # no processes yet
    if bf16 is False or on_cpu or (bf16 and not is_first):  # the device is not asked
        return bool(bf16)
    can = supports_bf16()
    if is_first and not can and torch.cuda.is_available():
        logger.warning_once(
            "this GPU only emulates bf16, slower than float32: launch with --mixed_precision fp16, or set fp16=True"
            if bf16
            else "bf16 is off, because this GPU does not support it; fp16=True saves as much memory"
        )
    return can if bf16 is None else bf16


def check_kl(kl_target: float | None, kl_coef: float) -> None:
    """Raise a `ValueError` if `kl_target` and `kl_coef` contradict each other."""
    if kl_target is not None and kl_coef == 0:
        raise ValueError(f"kl_target={kl_target} multiplies kl_coef=0, which stays 0; start from a positive kl_coef")


def check_output_dir(path: str | None) -> None:
    """Check that a run can write into a directory, or create it; create nothing.

    Args:
        path: The directory; None or "" is the working directory.

    Raises:
        ValueError: It cannot.
    """
    place = Path(os.path.expanduser(path or ".")).absolute()
    existing = next(part for part in (place, *place.parents) if part.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "is not writable" if existing.is_dir() else "is a file"
        raise ValueError(f"output_dir={path!r} cannot be written: {str(existing)!r} {reason}; name another")


def check_ptx(ptx_coef: float, ptx_dataset: object) -> None:
    """Raise an error if texts are given without `ptx_coef`, or the reverse, or have no rows by number."""
    if (ptx_coef > 0) != (ptx_dataset is not None):
        raise ValueError(f"ptx_coef={ptx_coef} weighs a loss on ptx_dataset: set both, or neither")
    has_rows = hasattr(ptx_dataset, "__len__") and hasattr(ptx_dataset, "__getitem__")
    if ptx_dataset is not None and (not has_rows or isinstance(ptx_dataset, str | Mapping)):
        raise TypeError(
            f"ptx_dataset={ptx_dataset!r:.80} must be a datasets.Dataset or a list of rows: load a name, choose a "
            "split, and make a list of a stream's first rows"
        )


def check_optimization(critic_learning_rate: float | None, optimizers: Sequence[object]) -> None:
    """Raise a `ValueError` if `critic_learning_rate` is given together with an optimizer."""
    if optimizers[0] is not None and critic_learning_rate is not None:
        raise ValueError(
            f"critic_learning_rate={critic_learning_rate} is for the trainer's own optimizer, but you passed "
            "optimizers[0]: set the rates in its groups"
        )


def check_critic_alone(
    critic_warmup_steps: int, rates: Mapping[str, float | None], policy: nn.Module, value_model: nn.Module
) -> None:
    """Check that the value model can learn alone, during critic warm-up.

    Args:
        critic_warmup_steps: Updates of the warm-up.
        rates: Options that scale the value model's steps, by name.
        policy: The policy.
        value_model: The value model.

    Raises:
        ValueError: It cannot.
    """
    if critic_warmup_steps == 0:
        return
    warmup = f"critic_warmup_steps={critic_warmup_steps} trains the value model alone"
    for name, rate in rates.items():
        if rate == 0:
            raise ValueError(f"{warmup}, but with {name}=0 it learns nothing; raise {name}")
    trained = {id(parameter) for parameter in value_model.parameters() if parameter.requires_grad}
    if not trained - {id(parameter) for parameter in policy.parameters()}:
        raise ValueError(
            f"{warmup}, but it has no trainable parameters of its own; give it some (value_peft_config, or "
            f"requires_grad_ on its head), or set critic_warmup_steps=0"
        )
