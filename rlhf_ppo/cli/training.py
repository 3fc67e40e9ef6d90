"""The three trainers of the pipeline, made from the arguments of a command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    dynamic_module_utils,
    set_seed,
)
from trl.trainer.model_config import ModelConfig
from trl.trainer.reward_config import RewardConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.utils import get_peft_config

from rlhf_ppo.checkpoints.disk import DiskFullError, remove_links
from rlhf_ppo.checkpoints.run import wanted_checkpoint
from rlhf_ppo.cli.checks import check_columns
from rlhf_ppo.cli.errors import fail, user_errors, wants_tracebacks
from rlhf_ppo.cli.quantization import quantization_options
from rlhf_ppo.cli.sources import PPOScriptArguments, choose_split, load_splits
from rlhf_ppo.cli.trackers import settle_trackers
from rlhf_ppo.cli.trl_training import ending_with_checkpoint, resumed_checkpoint
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.redaction import shown
from rlhf_ppo.models.adapters import is_adapter_directory
from rlhf_ppo.models.loading import CODE_IS_RUN_IF, load_classifier, load_pretrained, wants_code
from rlhf_ppo.models.reference import asks_for_reference
from rlhf_ppo.processes.signals import say
from rlhf_ppo.reporting.results import where_results_are
from rlhf_ppo.reporting.timing import note_on_memory
from rlhf_ppo.rewards.returned import WrongRewardError
from rlhf_ppo.rewards.waiting import RewardTimeoutError
from rlhf_ppo.terminal.foreign import print_text, visible_logger
from rlhf_ppo.terminal.progress import use_console
from rlhf_ppo.terminal.quiet import (
    bars_of_data_on_terminals,
    bars_of_models_on_terminals,
    no_bars_of_models,
    quiet_calls,
)
from rlhf_ppo.trainer import PPOTrainer
from rlhf_ppo.training.divergence import DivergenceError
from rlhf_ppo.training.publishing import upload_directory

dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # an error, where a library would ask on stdin about a model's code

logger = visible_logger(__name__)


def ppo_trainer(
    script_args: PPOScriptArguments,
    args: PPOConfig,
    model_args: ModelConfig,
    train_dataset: Any,
    eval_dataset: Any,
    *,
    reward_model: Any = None,
    value_model: Any = None,
    ref_model: str | None = None,
    reward_funcs: Any = None,
) -> PPOTrainer:
    """Load the tokenizer, the policy and the reference, and make the trainer.

    Args:
        script_args: Gives `trust_remote_code` and `ptx_dataset`.
        args: Gives `sft_model_path`, the policy at its start.
        model_args: How models are loaded, and the policy's adapter.
        train_dataset: The prompts.
        eval_dataset: The prompts for evaluation, or None.
        reward_model: As `PPOTrainer` takes it.
        value_model: As `PPOTrainer` takes it.
        ref_model: Path of the reference; None compares with the policy as it starts.
        reward_funcs: As `PPOTrainer` takes them.
    """
    settle_trackers(args)
    settings = loading_settings(script_args.trust_remote_code, model_args)
    peft_config = get_peft_config(model_args)
    ref_argument = "sft_model_path" if ref_model is None else "ref_model"
    is_whole = peft_config is None and not is_adapter_directory(args.sft_model_path)
    if ref_model is None and asks_for_reference(args) and is_whole:
        ref_model = args.sft_model_path
    texts = script_args.ptx_dataset
    if texts is not None:
        texts = choose_split(load_splits(texts, argument="ptx_dataset"), "train", "the split of ptx_dataset")
    model = load_pretrained(AutoModelForCausalLM, args.sft_model_path, "sft_model_path", **settings)
    return PPOTrainer(
        args,
        policy_tokenizer(script_args, args, model_args),
        model=model,
        ref_model=ref_model and load_pretrained(AutoModelForCausalLM, ref_model, ref_argument, **settings),
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config,
        reward_funcs=reward_funcs,
        ptx_dataset=texts,
    )


def scored_ppo_trainer(
    script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig, train_dataset: Any, eval_dataset: Any
) -> PPOTrainer:
    """Make the trainer with the reward model and the reward functions that the options name.

    Args:
        script_args: Gives `reward_funcs`.
        args: Gives `reward_model_path`.
        model_args: How models are loaded, and the policy's adapter.
        train_dataset: The prompts.
        eval_dataset: The prompts for evaluation, or None.
    """
    scorers = load_scorers(script_args, args, model_args) if has_reward_model(script_args, args) else {}
    data = (train_dataset, eval_dataset)
    return ppo_trainer(script_args, args, model_args, *data, reward_funcs=script_args.reward_funcs, **scorers)


def has_reward_model(script_args: PPOScriptArguments, args: PPOConfig) -> bool:
    """Tell whether a reward model scores: always without reward functions, beside them if its path is given."""
    default = PPOConfig.__dataclass_fields__["reward_model_path"].default
    return not script_args.reward_funcs or args.reward_model_path != default


def load_scorers(script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig) -> dict[str, Any]:
    """Load the reward model and, where it cannot become the value model as it is loaded, that too.

    Returns:
        Arguments of `ppo_trainer`.
    """
    if args.share_base_model and is_adapter_directory(args.reward_model_path):
        return {"reward_model": args.reward_model_path}  # the trainer puts it over the policy's base
    settings = loading_settings(script_args.trust_remote_code, model_args)
    labels = {} if args.reward_head else {"num_labels": 1}
    path, argument = args.reward_model_path, "reward_model_path"
    if path == args.sft_model_path:
        logger.warning_once(
            f"{argument}={path!r} is the policy, as in TRL's example: its score head is random unless it has one, and "
            "so are the scores"
        )
        models = {
            "reward_model": load_pretrained(AutoModelForSequenceClassification, path, argument, **labels, **settings)
        }
    else:
        models = {"reward_model": load_classifier(path, argument, **labels, **settings)}
    if not args.share_base_model and (settings["dtype"] != torch.float32 or "quantization_config" in settings):
        # All of the value model is trained: it stays in 32 bits, whatever the others are loaded in.
        whole = {name: settings[name] for name in ("revision", "attn_implementation", "trust_remote_code")}
        auto = AutoModelForSequenceClassification
        models["value_model"] = load_pretrained(auto, path, argument, num_labels=1, dtype=torch.float32, **whole)
    return models


@bars_of_data_on_terminals()
@bars_of_models_on_terminals()
def reward_trainer(args: RewardConfig, model_args: ModelConfig, train_dataset: Any, eval_dataset: Any) -> Trainer:
    """Make TRL's trainer of a reward model from pairs of a better and a worse response.

    Args:
        args: The arguments.
        model_args: The model that gets a scalar head, and its adapter.
        train_dataset: Rows with `chosen` and `rejected`, and `prompt` unless they begin with it.
        eval_dataset: Such rows for evaluation, or None.
    """
    from trl.trainer.reward_trainer import RewardTrainer

    path = _with_loading_settings(args, model_args)
    check_columns(train_dataset, [{"chosen", "rejected"}])
    tokenizer = load_tokenizer(path, args.trust_remote_code, "model_name_or_path")
    peft_config = get_peft_config(model_args)
    with quiet_calls(), _reading_weights(path):
        set_seed(args.seed)  # which the new head follows
        trainer = RewardTrainer(path, args, None, train_dataset, eval_dataset, tokenizer, peft_config=peft_config)
    return _in_lines(trainer)


@bars_of_data_on_terminals()
@bars_of_models_on_terminals()
def sft_trainer(args: SFTConfig, model_args: ModelConfig, train_dataset: Any, eval_dataset: Any) -> Trainer:
    """Make TRL's trainer of a language model that imitates texts.

    Args:
        args: The arguments.
        model_args: The model, and its adapter.
        train_dataset: Rows with a text, with `prompt` and `completion`, or with `messages`.
        eval_dataset: Such rows for evaluation, or None.
    """
    from trl.trainer.sft_trainer import SFTTrainer

    path = _with_loading_settings(args, model_args)
    check_columns(train_dataset, [{args.dataset_text_field}, {"messages"}, {"prompt", "completion"}, {"input_ids"}])
    tokenizer = load_tokenizer(path, args.trust_remote_code, "model_name_or_path")
    peft_config = get_peft_config(model_args)
    rows, held_out = (_without_lone_prompt(dataset) for dataset in (train_dataset, eval_dataset))
    with quiet_calls(), _reading_weights(path):
        set_seed(args.seed)  # which a new adapter follows
        trainer = SFTTrainer(path, args, None, rows, held_out, tokenizer, peft_config=peft_config)
    return _in_lines(trainer)


def _in_lines(trainer: Trainer) -> Trainer:
    """Let a trainer of TRL's print its logs as PPO's does, and pin memory only where there is a device for it."""
    trainer.args.dataloader_pin_memory = trainer.args.dataloader_pin_memory and trainer.args.device.type != "cpu"
    use_console(trainer, "line")
    return trainer


def _without_lone_prompt(dataset: Any) -> Any:
    """Leave out a `prompt` beside a text or messages: TRL takes it for the beginning of a `completion`."""
    if dataset is None or dataset.column_names is None:
        return dataset
    is_lone = "prompt" in dataset.column_names and "completion" not in dataset.column_names
    return dataset.remove_columns("prompt") if is_lone else dataset


class _Begun(TrainerCallback):
    """Notes that a run is under way: what is raised from then on is no error of its options."""

    begun = False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Note it."""
        self.begun = True


@contextmanager
def running(program: str, trainer: Trainer) -> Iterator[None]:
    """Turn what a run cannot help into one sentence: options that its start refuses, a server that does not answer.

    So are a full disk, too little memory, numbers that are not finite, what a reward function returns that is no
    reward, and Ctrl-C outside of PPO's training, which handles it itself.

    Everything else that is raised while a run goes on keeps its traceback, what a user's reward function raises too.

    Args:
        program: What the sentence begins with.
        trainer: What is about to train.

    Raises:
        SystemExit: With code 2 after such an error, 130 after Ctrl-C.
    """
    callback = _Begun()
    trainer.add_callback(callback)
    try:
        yield
    except KeyboardInterrupt:
        say(f"{program}: ended by SIGINT; what was written before is in {trainer.args.output_dir}")
        raise SystemExit(130) from None
    except (ConnectionError, DiskFullError, DivergenceError, RewardTimeoutError, WrongRewardError) as error:
        if wants_tracebacks():
            raise
        print(file=sys.stderr)  # the progress bar leaves its line unfinished
        fail(program, str(error))
    except Exception as error:
        if (note := note_on_memory(error)) and not wants_tracebacks():
            print(file=sys.stderr)
            fail(program, f"{note} ({error})")
        if callback.begun:
            raise
        with user_errors(program):
            raise
    finally:
        trainer.remove_callback(callback)


@bars_of_models_on_terminals()
def train_and_save(
    trainer: Trainer, dataset_name: str | None, *, merge: bool = False, show_samples: bool = False
) -> None:
    """Train, save the model with its tokenizer, log and card, upload it if asked to, and say in one line where all is.

    A signal ends TRL's trainers with a checkpoint, as it does PPO.

    Args:
        trainer: The trainer.
        dataset_name: Name of the data set, for the model card.
        merge: Whether to replace a LoRA adapter by the merged model.
        show_samples: Whether a `PPOTrainer` shows a table of all samples at the end.
    """
    args: Any = trainer.args
    dataset_name = shown(dataset_name)  # for model cards
    settle_trackers(args)
    if isinstance(trainer, PPOTrainer):
        trainer.dataset_name = dataset_name
    with nullcontext() if isinstance(trainer, PPOTrainer) else ending_with_checkpoint(trainer):
        trainer.train(resume_from_checkpoint=_resumed(trainer))
        if trainer.is_world_process_zero():
            remove_links(args.output_dir)
        trainer.save_model(args.output_dir, _internal_call=True)  # uploaded below, with its card
        trainer.save_state()
    cast(Any, trainer).create_model_card(dataset_name=dataset_name)
    _merge_and_upload(trainer, dataset_name, merge)
    if isinstance(trainer, PPOTrainer) and show_samples:
        trainer.generate_completions()
    if trainer.is_world_process_zero():
        is_policy = isinstance(trainer, PPOTrainer)
        print_text(
            where_results_are(args.output_dir, args.output_dir) if is_policy else f"The model is in {args.output_dir}."
        )


def _resumed(trainer: Trainer) -> str | bool | None:
    if isinstance(trainer, PPOTrainer):
        return wanted_checkpoint(trainer.args.resume_from_checkpoint)
    return resumed_checkpoint(trainer.args)


def _merge_and_upload(trainer: Trainer, dataset_name: str | None, merge: bool) -> None:
    args: Any = trainer.args
    adapter = os.path.join(args.output_dir, "adapter_config.json")
    trainer.accelerator.wait_for_everyone()
    if not (merge and os.path.isfile(adapter)):
        if args.push_to_hub:
            trainer.push_to_hub(dataset_name=dataset_name)
        return
    if trainer.accelerator.is_main_process:
        merge_adapter(args.output_dir, getattr(args, "trust_remote_code", False))
        if args.push_to_hub:
            upload_directory(args)
    trainer.accelerator.wait_for_everyone()


def merge_adapter(directory: str, trust_remote_code: bool = False) -> None:
    """Replace the adapter in a directory by the model that it makes of its base, in the base's own precision.

    Args:
        directory: What `save_model` wrote.
        trust_remote_code: Whether to run code that comes with the base.
    """
    from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftConfig

    trust: Any = {"trust_remote_code": trust_remote_code}
    scores = PeftConfig.from_pretrained(directory).task_type == "SEQ_CLS"
    if scores:
        adapted = AutoPeftModelForSequenceClassification.from_pretrained(directory, num_labels=1, **trust)
    else:
        adapted = AutoPeftModelForCausalLM.from_pretrained(directory, **trust)
    merged: Any = adapted.merge_and_unload()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        os.remove(os.path.join(directory, name))
    with no_bars_of_models():
        merged.save_pretrained(directory)


def policy_tokenizer(
    script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig
) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer, from `model_name_or_path` where that is given."""
    path = model_args.model_name_or_path
    argument = "model_name_or_path" if path else "sft_model_path"
    return load_tokenizer(path or args.sft_model_path, script_args.trust_remote_code, argument)


def load_tokenizer(path: str, trust_remote_code: bool, argument: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer that pads on the left, with EOS where it has no PAD.

    Args:
        path: A directory, or a hub name.
        trust_remote_code: Whether to run code that comes with it.
        argument: The option that gave the path, for the error message.

    Raises:
        ValueError: There is no tokenizer, or its files are damaged.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError) as error:
        if wants_code(error):
            raise ValueError(f"{argument}={path!r} {CODE_IS_RUN_IF}") from error
        what = f"has no tokenizer that can be read: {error}" if os.path.isdir(path) else (
            "is neither a directory with a tokenizer nor a model that the hub gave"
        )  # fmt: skip
        raise ValueError(f"{argument}={path!r} {what}; save one there with tokenizer.save_pretrained") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # a new token would lie outside the models' vocabularies
    return tokenizer


def loading_settings(trust_remote_code: bool, model_args: ModelConfig) -> dict[str, Any]:
    """Return the keyword arguments of `from_pretrained`."""
    dtype = model_args.dtype
    return {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": trust_remote_code,
        "dtype": dtype if dtype in ("auto", None) else getattr(torch, dtype),
        **quantization_options(model_args),
    }


def check_model(path: str, argument: str, trust_remote_code: bool) -> None:
    """Check that a directory or the hub has a model's configuration, or an adapter's.

    Raises:
        ValueError: It has none.
    """
    if is_adapter_directory(path):
        return
    load_pretrained(AutoConfig, path, argument, trust_remote_code=trust_remote_code)


@contextmanager
def _reading_weights(path: str) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"model_name_or_path={path!r} could not be loaded: its weights are damaged ({error})"
        ) from error


def _with_loading_settings(args: Any, model_args: ModelConfig) -> str:
    if model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path=None: give the directory or hub name of the model to train")
    check_model(model_args.model_name_or_path, "model_name_or_path", args.trust_remote_code)
    given = args.model_init_kwargs or {}
    args.model_init_kwargs = {**loading_settings(args.trust_remote_code, model_args), **given}
    return model_args.model_name_or_path
