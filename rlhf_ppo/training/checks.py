"""Checks of the constructor's arguments, before any weight is loaded."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, get_scheduler
from transformers.optimization import GreedyLR
from transformers.trainer_utils import IntervalStrategy
from transformers.utils.import_utils import is_peft_available

from rlhf_ppo.algorithm.advantages import FixedKLController, check_coefficient
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.inherited import check_keys
from rlhf_ppo.config.ppo_config import Sizes, settings_of
from rlhf_ppo.config.unused import TrainerContext, unused_options
from rlhf_ppo.data.prompts import NoPrompts, Prompts, columns_of, prompt_column
from rlhf_ppo.models.reference import Reference
from rlhf_ppo.processes.distributed import get_logger, num_processes, preserve_rng, zero_stage
from rlhf_ppo.rewards.scorer import Scorer
from rlhf_ppo.training.optimization import check_pair
from rlhf_ppo.training.run_state import RunState, SpecialTokens

logger = get_logger(__name__)

_16_BITS = {torch.bfloat16, torch.float16}
_PATH = (str, os.PathLike)

KEPT = frozenset(
    """
    kl_controller policy_model reference reward_models score_moments scorer sizes tokens value_model _reward_funcs
    _checkpoints _critic_only _directory _engine _episodes _is_stepped
    _optimization _policy_loss _preparation _printed _ptx _rollout_metrics _rollouts _run
    """.split()
)
"""Attributes of `PPOTrainer` that Trainer does not have."""

_KINDS = {"reference": Reference | None, "scorer": Scorer, "sizes": Sizes, "tokens": SpecialTokens}


def check_subclass(trainer: object, parent: type) -> None:
    """Check that a subclass uses no attribute of `PPOTrainer`, and that its steps take the same arguments.

    Args:
        trainer: An instance before construction.
        parent: `PPOTrainer`.

    Raises:
        TypeError: A name of the subclass is taken.
    """
    classes = type(trainer).__mro__
    for owner in classes[: classes.index(parent)]:
        for name, value in vars(owner).items():
            if name in KEPT:
                raise _in_use(owner, name, value)
            if name in vars(parent) and not name.startswith("_"):
                _check_step(owner, name, value, vars(parent)[name])
    for name in vars(trainer).keys() & KEPT:
        raise _in_use(type(trainer), name, vars(trainer)[name])


def check_kept(trainer: object) -> None:
    """Check before a run that a subclass has not replaced attributes of `PPOTrainer`.

    Raises:
        TypeError: It has.
    """
    for name, kind in _KINDS.items():
        if not isinstance(value := vars(trainer)[name], kind):
            raise _in_use(type(trainer), name, value)


def _in_use(owner: type, name: str, value: Any) -> TypeError:
    return TypeError(
        f"{owner.__name__}.{name}={value!r:.60}, but PPOTrainer keeps something of its own under this name; give the "
        "subclass's attribute another one"
    )


def _check_step(owner: type, name: str, value: Any, ours: Any) -> None:
    """Check that an overriding method takes the arguments of `PPOTrainer`'s."""
    if not inspect.isfunction(ours):
        return
    expected = inspect.signature(ours)
    required = [part for part in expected.parameters.values() if part.default is part.empty]
    try:
        inspect.signature(value).bind(*required)
    except ValueError:  # it has no signature
        return
    except TypeError as error:
        raise TypeError(
            f"{owner.__name__}.{name}={value!r:.60} cannot take the place of PPOTrainer.{name}{expected}: {error}; "
            "give it another name, or these parameters"
        ) from error


def check_arguments(args: Any) -> None:
    """Check that the arguments are a `PPOConfig`, that `output_dir` is writable, and that trackers have their keys.

    Raises:
        TypeError: `args` is no `PPOConfig`.
        ValueError: `output_dir` is not writable, or a tracker has no key.
    """
    if not isinstance(args, PPOConfig):
        raise TypeError(f"args must be a PPOConfig, got {type(args).__name__}")
    check_output_dir(args.output_dir)
    check_keys(args)


def check_output_dir(path: str | None) -> None:
    """Check that a run can write into a directory, or create it; create nothing.

    Args:
        path: The directory.

    Raises:
        ValueError: It cannot.
    """
    check_writable(path, "output_dir")


def check_writable(path: str | None, argument: str) -> Path:
    """Check that a directory is writable, or can be created; create nothing.

    Args:
        path: The directory; None or "" is the working directory.
        argument: The option that gave it, for the error message.

    Returns:
        Its absolute path.

    Raises:
        ValueError: It is not.
    """
    try:
        place = Path(os.path.expanduser(path or ".")).absolute()
        if b"\0" in str(place).encode():
            raise ValueError("no name holds a null character")
        missing = list(itertools.takewhile(lambda part: not part.exists(), (place, *place.parents)))
    except (OSError, ValueError) as error:
        raise ValueError(f"{argument}={path!r:.80} cannot be written: {getattr(error, 'strerror', error)}") from error
    found = missing[-1].parent if missing else place
    if not found.is_dir() or not os.access(found, os.W_OK):
        reason = "is not writable" if found.is_dir() else "is a file"
        raise ValueError(f"{argument}={path!r} cannot be written: {str(found)!r} {reason}; name another")
    return place


def check_models(reward_model: Any, has_functions: bool, **models: Any) -> None:
    """Check the types of the models, and that there is a reward.

    Args:
        reward_model: One or several reward models.
        has_functions: Whether there are reward functions.
        **models: The other models by their arguments' names.

    Raises:
        TypeError: A value is not a model or path.
        ValueError: There is no reward.
    """
    for name, model in models.items():
        if not isinstance(model, (*_PATH, nn.Module)) and (model is not None or name == "model"):
            raise TypeError(_no_model(name, model))
    several = isinstance(reward_model, list | tuple)
    for index, model in enumerate(reward_model if several else [reward_model]):
        if not isinstance(model, (*_PATH, nn.Module)) and (several or model is not None):
            raise TypeError(_no_model(f"reward_model[{index}]" if several else "reward_model", model))
    if not has_functions and (reward_model is None or (several and not reward_model)):
        raise ValueError("reward_model and reward_funcs are both None: pass one of them, or both")


def _no_model(name: str, value: Any) -> str:
    return (
        f"{name} must be a transformers model, a PeftModel, a directory or a hub name, got {type(value).__name__} "
        f"({value!r:.60})"
    )


def check_rows(dataset: Any, name: str, check_columns: Callable[[Sequence[str]], object] | None = None) -> None:
    """Check the type of a data set and its first row; streams are not read.

    Args:
        dataset: The user's data set.
        name: Its name in errors.
        check_columns: Checks the columns of a `datasets.Dataset`; None: one of them holds prompts.

    Raises:
        TypeError: It is no data set, or its first row is not a dict.
        ValueError: It has no rows, or a `datasets.Dataset` has no column with prompts.
    """
    if isinstance(dataset, datasets.IterableDataset | torch.utils.data.IterableDataset):
        return
    columns = columns_of(dataset, name)
    if isinstance(dataset, datasets.Dataset):
        (check_columns or partial(prompt_column, name=name))(columns)
    for column in ("image", "images"):  # TRL's names
        if column in columns:
            logger.warning(f"{name} has the column {column!r}: the policy reads text only, and never sees it.")


def check_datasets(args: PPOConfig, train_dataset: Any, eval_dataset: Any, needs_prompts: bool = True) -> None:
    """Check the types of the data sets, their first rows, and that evaluation has prompts.

    Args:
        args: The arguments.
        train_dataset: The training set.
        eval_dataset: The evaluation set, several by name, or None.
        needs_prompts: Whether a column holds prompts; environments need none.

    Raises:
        TypeError: A value is not a data set, or its rows are no dicts.
        ValueError: Prompts are missing.
    """
    if train_dataset is None:
        raise ValueError("train_dataset=None: pass the prompts to train on")
    if isinstance(train_dataset, NoPrompts) and args.num_generations > 1:
        raise ValueError(
            f"num_generations={args.num_generations} repeats the prompts of train_dataset, but there is none; leave "
            "it 1, and pass a query to step() as often as it has responses"
        )
    columns: Any = None if needs_prompts else list
    check_rows(train_dataset, "train_dataset", columns)
    _check_lengths_column(args, train_dataset)
    if eval_dataset is None:
        evaluating = {
            f"eval_strategy={IntervalStrategy(args.eval_strategy).value!r}": args.eval_strategy != "no",
            "eval_on_start=True": args.eval_on_start,
        }
        if option := next((option for option, is_set in evaluating.items() if is_set), None):
            raise ValueError(f"{option} evaluates, but eval_dataset=None: pass the prompts to evaluate on")
    elif isinstance(eval_dataset, Mapping):
        if not eval_dataset:
            raise ValueError(f"eval_dataset={eval_dataset!r} is not a data set; pass one, or None")
        if others := [name for name in eval_dataset if not isinstance(name, str)]:
            raise TypeError(f"eval_dataset has a data set of the name {others[0]!r}: names must be texts")
        for name, dataset in eval_dataset.items():
            check_rows(dataset, f"eval_dataset[{name!r}]", columns)
    else:
        check_rows(eval_dataset, "eval_dataset", columns)


def _check_lengths_column(args: PPOConfig, dataset: Any) -> None:
    column = args.length_column_name
    features = getattr(dataset, "features", None) or {}
    if args.train_sampling_strategy == "group_by_length" and column in features:
        if not str(getattr(features[column], "dtype", "")).startswith(("int", "uint")):
            raise ValueError(
                f"length_column_name={column!r} holds no whole numbers; leave it out to have them counted"
            )


def check_others(
    args: PPOConfig,
    data_collator: Any,
    callbacks: Any,
    optimizers: Any,
    kl_controller: Any,
    engine: Any,
    ptx_dataset: Any,
    **adapters: Any,
) -> None:
    """Check the remaining arguments.

    Args:
        args: The arguments.
        data_collator: A callable, or None.
        callbacks: A list of callbacks, or of their classes, or None.
        optimizers: See `rlhf_ppo.training.optimization.Optimizers`.
        kl_controller: A `KLController`, or None.
        engine: A `GenerationEngine`, or None.
        ptx_dataset: Texts, if `args.ptx_coef` is above 0.
        **adapters: Adapter configurations by their arguments' names.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: The scheduler belongs to another optimizer, the KL coefficient is negative or not finite, or texts
            are given without their coefficient, or the reverse.
    """
    if data_collator is not None and not callable(data_collator):
        raise TypeError(
            f"data_collator={data_collator!r:.60} cannot be called; pass a function, or None for PPO's own"
        )
    if callbacks is not None and not isinstance(callbacks, list):
        raise TypeError(f"callbacks={callbacks!r:.60} must be a list of TrainerCallback objects")
    for callback in callbacks or []:
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise TypeError(f"callbacks holds {callback!r:.60}, which is not a TrainerCallback")
    check_pair(optimizers)
    _check_doors(kl_controller, engine)
    if args.ptx_coef > 0 and ptx_dataset is None:
        raise ValueError(
            f"ptx_coef={args.ptx_coef} weighs a loss on ptx_dataset, but there is none: pass ptx_dataset, or set "
            "ptx_coef=0"
        )
    if ptx_dataset is not None and args.ptx_coef == 0:
        raise ValueError("ptx_dataset is given, but ptx_coef=0 gives it no weight: set ptx_coef, such as to 1")
    for name, config in adapters.items():
        if config is not None and not (is_peft_available() and isinstance(config, import_module("peft").PeftConfig)):
            raise TypeError(f"{name} must be a peft.PeftConfig such as LoraConfig, got {type(config).__name__}")


def _check_doors(kl_controller: Any, engine: Any) -> None:
    """Check objects that replace the package's own."""
    needed = {
        "kl_controller": (kl_controller, ("update", "state_dict", "load_state_dict")),
        "engine": (engine, ("sample", "policy_changed")),
    }
    for name, (value, methods) in needed.items():
        if value is None:
            continue
        missing = [f"{method}()" for method in methods if not callable(getattr(value, method, None))]
        if name == "kl_controller" and not isinstance(getattr(value, "coef", None), int | float):
            missing.append("coef, a number")
        if name == "engine" and not isinstance(getattr(value, "reads_sharded", None), bool):
            missing.append("reads_sharded, True or False")
        if isinstance(value, type):
            missing = [f"{name}={value.__name__}() instead of the class"]
        if missing:
            raise TypeError(f"{name}={value!r:.60} needs {', '.join(missing)}")
    if kl_controller is not None:
        check_coefficient(kl_controller)


def warn_of_unused_options(run: RunState, models: Any, policy_loss: Any, kl_controller: Any, **given: bool) -> None:
    """Warn of options without effect in a run, each with its value, the reason and a fix; and of wide clip ranges.

    Args:
        run: The run.
        models: The trainer's `Models`.
        policy_loss: The policy loss that replaces PPO's, or None.
        kl_controller: The KL controller.
        **given: `is_stepped`, `has_engine`, `has_evaluation`, `has_episodes`, `has_chats`, `has_optimizer` and
            `has_schedule` of `TrainerContext`.
    """
    args, dtypes = run.args, {parameter.dtype for parameter in models.policy.parameters()}
    beside = TrainerContext(
        has_reference=models.reference is not None,
        has_loss=policy_loss is not None,
        has_controller=args.kl_target is None and not isinstance(kl_controller, FixedKLController),
        has_frozen=models.frozen_reference is not None or bool(models.rewards),
        has_accelerator=run.accelerator.device.type != "cpu",
        gathers_weights=zero_stage(run.accelerator) == 3,
        has_16_bits=run.accelerator.mixed_precision in ("bf16", "fp16") or bool(dtypes & _16_BITS),
        **given,
    )
    if found := unused_options(args, beside):
        logger.warning(f"Options that change nothing in this run: {'; '.join(found.values())}.")


def check_collator(collate: Callable[[list[Any]], Any], rows: list[Any]) -> None:
    """Make one batch, to find errors of a collator before anything is generated.

    Args:
        collate: The user's collator.
        rows: First rows of the training set, as many as a process uses in an update.

    Raises:
        TypeError: It returned no prompts.
        ValueError: It returned another number of prompts, or of another shape.
    """
    try:
        with preserve_rng():
            batch = collate(rows)
    except Exception as error:
        error.add_note("raised by data_collator, given the first rows of train_dataset")
        raise
    if not isinstance(batch, Mapping) or not {"input_ids", "attention_mask"} <= batch.keys():
        returned = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise TypeError(f"data_collator returned {returned}, not a dict with input_ids and attention_mask")
    if (num_prompts := len(Prompts.from_collated(batch, torch.device("cpu")))) != len(rows):
        raise ValueError(f"data_collator returned {num_prompts} prompts for {len(rows)} rows; return one for each row")


def check_optimization(args: PPOConfig, optimizers: Sequence[Any], num_rows: int | None) -> None:
    """Check that optimizer and schedule can be made from the arguments, on one number.

    Args:
        args: The arguments.
        optimizers: Given optimizer and scheduler, which are not made here.
        num_rows: Rows of the training set; None for a stream.

    Raises:
        ValueError: One cannot be made, the schedule follows a metric that is never computed, or the sizes of the run
            do not fit.
    """
    num_updates = args.count_sizes(num_processes(args), num_rows).num_total_batches
    if isinstance(optimizers[1], torch.optim.lr_scheduler.ReduceLROnPlateau | GreedyLR) and args.eval_strategy == "no":
        raise ValueError(
            f"optimizers[1] is a {type(optimizers[1]).__name__}, which follows evaluations, but eval_strategy='no'; "
            "set eval_strategy to 'steps' or 'epoch'"
        )
    if optimizers[0] is not None and args.critic_learning_rate is not None:
        raise ValueError(
            f"critic_learning_rate={args.critic_learning_rate} is of the optimizer that the trainer makes, but "
            "optimizers[0] is given; give its groups their rates, and leave critic_learning_rate None"
        )
    if optimizers[0] is None and args.optim_target_modules is None:  # with target modules it needs the model
        try:
            Trainer.get_optimizer_cls_and_kwargs(args)
        except Exception as error:
            given = f"optim={args.optim.value!r} with optim_args={args.optim_args!r}"  # pyright: ignore
            raise ValueError(f"{given} cannot be used: {error}") from error
    if optimizers[1] is None:
        try:
            get_scheduler(
                args.lr_scheduler_type,
                torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0),
                args.get_warmup_steps(num_updates),
                num_updates,
                settings_of(args.lr_scheduler_kwargs),
            )
        except Exception as error:
            name = args.lr_scheduler_type.value  # pyright: ignore[reportAttributeAccessIssue]
            given = f"lr_scheduler_type={name!r} with lr_scheduler_kwargs={args.lr_scheduler_kwargs!r}"
            raise ValueError(f"{given} cannot be used: {error}") from error


def check_critic_alone(args: PPOConfig, policy: nn.Module, value_model: nn.Module) -> None:
    """Check that the value model can learn alone, during critic warm-up.

    Raises:
        ValueError: It cannot.
    """
    if args.critic_warmup_steps == 0:
        return
    given = f"critic_warmup_steps={args.critic_warmup_steps} trains the value model alone"
    for rate in ("vf_coef", "critic_learning_rate"):
        if getattr(args, rate) == 0:
            raise ValueError(f"{given}, but with {rate}=0 it learns nothing; raise {rate}")
    own = {id(each) for each in value_model.parameters() if each.requires_grad}
    if not own - {id(each) for each in policy.parameters()}:
        raise ValueError(
            f"{given}, but it has no trainable parameters of its own; give it some (value_peft_config, or "
            f"requires_grad_ on its head), or set critic_warmup_steps=0"
        )
