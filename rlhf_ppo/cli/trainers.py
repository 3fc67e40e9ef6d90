"""Trainers of SFT, reward model and PPO from the arguments of a command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from huggingface_hub import HfApi
from pyarrow import ChunkedArray, compute
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    IntervalStrategy,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    dynamic_module_utils,
    set_seed,
)
from transformers.utils import logging as transformers_logging
from trl.trainer.model_config import ModelConfig
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import get_peft_config, get_quantization_config

from rlhf_ppo.cli.arguments import PPOScriptArguments, check_columns, prepare_trackers
from rlhf_ppo.cli.errors import fail, user_errors, wants_tracebacks
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import logging_interval
from rlhf_ppo.data.files import write_text
from rlhf_ppo.data.prompts import PROMPT_COLUMNS, is_conversation, num_rows
from rlhf_ppo.data.sources import Rows, choose_split, hold_out_pairs, load_splits
from rlhf_ppo.generation.sampling import SpecialTokens
from rlhf_ppo.models.adapters import adapter_config, base_of_adapter, is_adapter_directory, load_adapter
from rlhf_ppo.models.heads import is_head_of_policy, reads_last_token
from rlhf_ppo.models.loading import (
    check_start_elsewhere,
    load_classifier,
    load_pretrained,
    remove_saved_models,
    starts_of,
    why_not_loaded,
    without_adapters,
)
from rlhf_ppo.models.reference import asks_for_reference
from rlhf_ppo.models.unwrapping import as_module, drop_ignored_generation_settings, transformers_model
from rlhf_ppo.ranks.signals import say
from rlhf_ppo.reporting.console import use_console
from rlhf_ppo.reporting.judgements import ACCURACY, RewardAccuracy
from rlhf_ppo.reporting.metrics import note_on_memory
from rlhf_ppo.reporting.model_card import CARD, if_on_hub, model_origin, with_local_names
from rlhf_ppo.reporting.run_log import SETTINGS_NAME, where_results_are
from rlhf_ppo.rewards.reward_model import shares_tokens, tokenizer_beside
from rlhf_ppo.rewards.scorer import WrongRewardError
from rlhf_ppo.run.checkpoints import last_complete_checkpoint, parse_resume
from rlhf_ppo.run.rollouts import DivergenceError
from rlhf_ppo.run.saving import stopping_as_trained
from rlhf_ppo.terminal import (
    print_text,
    redacted,
    visible_logger,
)
from rlhf_ppo.trainer import PPOTrainer

dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # an error instead of a question on stdin about a model's code

logger = visible_logger(__name__)


# ---- Loading ----


def load_tokenizer(
    path: str, trust_remote_code: bool, argument: str, revision: str = "main"
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that pads on the left; without a PAD token, EOS is its PAD.

    Args:
        path: A directory, or a hub name.
        trust_remote_code: Whether to run code of its repository.
        argument: The option that gave the path, for the error message.
        revision: Branch, tag or commit of its repository.

    Raises:
        ValueError: There is no tokenizer, or its files are damaged.
    """
    of_files = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", **of_files)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = why_not_loaded(error, path, "has no tokenizer that can be read")
        raise ValueError(f"{argument}={path!r} {reason}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # a new token would be outside the models' vocabularies
    return tokenizer


def loading_settings(trust_remote_code: bool, model_args: ModelConfig) -> dict[str, Any]:
    """Return the keyword arguments of `from_pretrained`."""
    dtype, quantization = model_args.dtype, get_quantization_config(model_args)
    settings = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": trust_remote_code,
        "dtype": dtype if dtype in ("auto", None) else getattr(torch, dtype),
    }
    if quantization is not None:
        settings |= {"quantization_config": quantization, "device_map": {"": PartialState().device}}
    return settings


def lora_config(model_args: ModelConfig) -> Any:
    """Return the LoRA configuration, or None; a single target module stays in a list.

    TRL turns a list of one name into a text, which PEFT reads as a pattern for the whole path of a module.
    """
    modules: Any = model_args.lora_target_modules
    if isinstance(modules, str) and modules.isidentifier():  # no pattern, and not "all-linear"
        model_args.lora_target_modules = [modules]
    config: Any = get_peft_config(model_args)
    if config is not None:
        config.revision = model_args.model_revision  # of the base, for loading and merging
    return config


# ---- PPO ----


def ppo_trainer(
    script_args: PPOScriptArguments,
    args: PPOConfig,
    model_args: ModelConfig,
    train_dataset: Rows,
    eval_dataset: Rows | None,
    *,
    ref_model: str | None = None,
    **more: Any,
) -> PPOTrainer:
    """Load the tokenizer, the policy and the reference, and make the trainer.

    Args:
        script_args: Gives `trust_remote_code` and `ptx_dataset`.
        args: Gives `sft_model_path`, the policy at its start.
        model_args: How models are loaded, and the policy's adapter.
        train_dataset: The prompts.
        eval_dataset: The prompts for evaluation, or None.
        ref_model: Path of the reference; None compares with the policy as it starts.
        **more: Further arguments of `PPOTrainer`.
    """
    prepare_trackers(args)
    settings, peft_config = loading_settings(script_args.trust_remote_code, model_args), lora_config(model_args)
    ref_argument = "sft_model_path" if ref_model is None else "ref_model"
    starts_from_adapter = is_adapter_directory(args.sft_model_path)
    if starts_from_adapter and peft_config is not None:
        peft_config = None
        _say_adapter_stays(args.sft_model_path)
    is_whole = peft_config is None and not starts_from_adapter
    if ref_model is None and is_whole and asks_for_reference(args):
        ref_model = args.sft_model_path  # loaded again: a policy that ZeRO-3 has sharded cannot be copied
    texts = script_args.ptx_dataset
    if texts is not None:
        texts = choose_split(load_splits(texts, argument="ptx_dataset"), "train", "the split of ptx_dataset")
    return PPOTrainer(
        args,
        _tokenizer(script_args, args, model_args),
        model=load_pretrained(AutoModelForCausalLM, args.sft_model_path, "sft_model_path", **settings),
        ref_model=ref_model and load_pretrained(AutoModelForCausalLM, ref_model, ref_argument, **settings),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config,
        ptx_dataset=texts,
        **more,
    )


def _tokenizer(script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer."""
    path = model_args.model_name_or_path
    argument = "model_name_or_path" if path else "sft_model_path"
    trusts, revision = script_args.trust_remote_code, model_args.model_revision
    return load_tokenizer(path or args.sft_model_path, trusts, argument, revision)


def say_how_prompts_are_read(rows: object, tokenizer: Any) -> None:
    """Print a line if the first prompt is a text, without a chat template, or a begun answer; no stream is read."""
    first = rows[0] if isinstance(rows, Dataset) else {}
    prompt = next((first[column] for column in PROMPT_COLUMNS if column in first), None)
    if isinstance(prompt, str) and tokenizer.chat_template is not None:
        print_text("The prompts are texts: the model's chat template is not used. Write lists of messages to use it.")
    if is_conversation(prompt) and prompt[-1]["role"] == "assistant":
        print_text("The first prompt ends with an assistant's message: the policy continues that message.")


def has_reward_model(script_args: PPOScriptArguments, args: PPOConfig) -> bool:
    """Return whether a reward model scores: if its path is given, or without reward functions and environments."""
    default = PPOConfig.__dataclass_fields__["reward_model_path"].default
    return not (script_args.reward_funcs or script_args.environment) or args.reward_model_path != default


def load_scorers(script_args: PPOScriptArguments, args: PPOConfig, model_args: ModelConfig) -> dict[str, Any]:
    """Load the reward model and the value model, which learns in float32; None: the trainer makes it.

    `model_revision` is the policy's; reward and value models are read from `main`.

    With `share_base_model`, paths are returned: the trainer puts the adapters over the policy's base. "policy" stays.

    Returns:
        Arguments of `PPOTrainer`.
    """
    trusts = script_args.trust_remote_code
    settings = loading_settings(trusts, model_args) | {"revision": "main"}
    in_float32: Any = {name: settings[name] for name in ("attn_implementation", "trust_remote_code")}
    in_float32["dtype"] = torch.float32
    is_other = settings["dtype"] != torch.float32 or "quantization_config" in settings
    path, value_path, argument = args.reward_model_path, script_args.value_model_path, "reward_model_path"
    reward_model: Any = None
    is_used_as_it_is = args.share_base_model or is_head_of_policy(value_path)
    value_model: Any = value_path if is_used_as_it_is else None
    if has_reward_model(script_args, args):
        if args.share_base_model and is_adapter_directory(path):
            reward_model = path
        else:
            reward_model = _load_reward_model(path, settings)
        if is_other and value_path is None and not args.share_base_model:
            tokenizer, beside = _tokenizer(script_args, args, model_args), tokenizer_beside(path, trusts)
            reads_tokens = beside is None or shares_tokens(tokenizer, beside)
            if reads_tokens and reads_last_token(reward_model):  # else it is made from the policy
                value_model = load_classifier(path, argument, is_value_model=True, **in_float32)
    if value_path is not None and not is_used_as_it_is:
        value_model = load_classifier(value_path, "value_model_path", is_value_model=True, **in_float32)
    return {"reward_model": reward_model, "value_model": value_model}


def _load_reward_model(path: str, settings: Mapping[str, Any]) -> Any:
    try:
        return load_classifier(path, "reward_model_path", **settings)
    except ValueError as error:
        if path != PPOConfig.__dataclass_fields__["reward_model_path"].default:
            raise
        raise ValueError(
            "no reward is given, and TRL's default cannot be loaded: give reward_model_path, reward_funcs or "
            f"environment ({error})"
        ) from error


# ---- TRL's trainers ----


class _SavesWhole(Trainer):
    """Base of TRL's trainers: saving replaces an earlier model; the card names local models, without hub links."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        directory = output_dir or str(self.args.output_dir)
        check_start_elsewhere(starts_of([as_module(self.model)]), directory)
        remove_saved_models(directory)
        for name in (SETTINGS_NAME, ACCURACY):  # of an earlier model
            Path(directory, name).unlink(missing_ok=True)
        super()._save(output_dir, state_dict)

    def create_model_card(
        self, model_name: str | None = None, *, dataset_name: str | None = None, **more: Any
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.is_world_process_zero():
            folder = Path(str(self.args.output_dir))
            name = folder.absolute().name
            trl: Any = super()
            trl.create_model_card(model_name or name, dataset_name=if_on_hub(dataset_name), **more)
            base = model_origin(as_module(self.model))
            card = (folder / CARD).read_text(encoding="utf-8")
            write_text(folder / CARD, with_local_names(card, name, base, dataset_name))


class _RewardTrainer(_SavesWhole, RewardTrainer):
    pass


class _SFTTrainer(_SavesWhole, SFTTrainer):
    pass


PAIRS = [{"chosen", "rejected"}]
"""The columns of a reward model's data."""


def reward_trainer(
    args: RewardConfig, model_args: ModelConfig, train_dataset: Rows, eval_dataset: Rows | None
) -> Trainer:
    """Make TRL's trainer of a reward model from preference pairs.

    Args:
        args: The arguments.
        model_args: The model, which gets a scalar head, and its adapter.
        train_dataset: Rows with `chosen` and `rejected`, and `prompt` unless both begin with it.
        eval_dataset: Rows for evaluation, or None.
    """
    check_columns(train_dataset, PAIRS)
    trainer: Any = _trl_trainer(_RewardTrainer, args, model_args, train_dataset, eval_dataset)
    if isinstance(train_dataset, Dataset) and (dropped := len(train_dataset) - len(trainer.train_dataset)):
        told = f"dropped {dropped} of {len(train_dataset)} pairs, longer than max_length={args.max_length} tokens"
        if dropped == len(train_dataset):
            raise ValueError(f"train_dataset: {told}; raise it, or shorten the prompts")
        logger.warning(f"train_dataset: {told}")
    return trainer


def measured_reward_trainer(
    args: RewardConfig, model_args: ModelConfig, train_dataset: Rows, eval_dataset: Rows | None
) -> Trainer:
    """Make the trainer of a reward model; without rows for evaluation, hold some out for its accuracy.

    They are drawn from the pairs that remain after TRL has left out those longer than `max_length`.

    Args:
        args: As in `reward_trainer`.
        model_args: As in `reward_trainer`.
        train_dataset: As in `reward_trainer`; nothing is held out of a stream.
        eval_dataset: As in `reward_trainer`.

    Raises:
        ValueError: `eval_strategy` asks for an evaluation, but no pair can be held out.
    """
    if eval_dataset is not None or not isinstance(train_dataset, Dataset):
        return reward_trainer(args, model_args, train_dataset, eval_dataset)
    some = train_dataset.select(range(min(len(train_dataset), args.dataset_num_proc or 1)))  # replaced below
    trainer: Any = reward_trainer(args, model_args, train_dataset, some)
    trainer.train_dataset, trainer.eval_dataset = hold_out_pairs(trainer.train_dataset)
    if trainer.eval_dataset is None and args.eval_strategy != "no":
        raise ValueError(
            f"eval_strategy={IntervalStrategy(args.eval_strategy).value!r}: none of the {len(trainer.train_dataset)} "
            "pairs can be held out, which takes at most a tenth of them and all pairs of a prompt together: name a "
            "split with dataset_test_split, or leave eval_strategy out"
        )
    return trainer


def measure_accuracy(trainer: Trainer) -> RewardAccuracy | None:
    """Measure a reward model on held-out pairs, print its accuracy and write it beside the model.

    Args:
        trainer: The trainer of `measured_reward_trainer`, after training.

    Returns:
        The accuracy; None if there are no held-out pairs, or their number is not known.
    """
    pairs: Any = trainer.eval_dataset
    if not num_rows(pairs):
        return None
    trainer.preprocess_logits_for_metrics = _right_pairs  # TRL's accuracy is a mean over batches
    right: Any = trainer.predict(pairs).predictions
    accuracy = RewardAccuracy.of(float(right.mean()), len(right))
    if trainer.is_world_process_zero():
        accuracy.save(str(trainer.args.output_dir))
        print_text(f"The reward model is {accuracy}.")
        if accuracy.state is not None:
            logger.warning(
                f"The reward model is {accuracy.state}: {accuracy.advice}. PPO cannot be better than its reward."
            )
    return accuracy


def _right_pairs(scores: torch.Tensor, labels: object) -> torch.Tensor:
    """Return 1 for each pair of a batch whose better response scores higher, and 0.5 for a tie."""
    better, worse = scores.squeeze(-1).chunk(2)
    return torch.heaviside((better - worse).float(), torch.tensor(0.5, device=scores.device))


def text_columns(args: SFTConfig) -> list[set[str]]:
    """Return the alternative sets of columns for SFT."""
    return [{args.dataset_text_field}, {"messages"}, {"prompt", "completion"}, {"input_ids"}]


def sft_trainer(args: SFTConfig, model_args: ModelConfig, train_dataset: Rows, eval_dataset: Rows | None) -> Trainer:
    """Make TRL's trainer of a language model from texts.

    Args:
        args: The arguments.
        model_args: The model, and its adapter.
        train_dataset: Rows with a text, with `prompt` and `completion`, or with `messages`.
        eval_dataset: Rows for evaluation, or None.
    """
    check_columns(train_dataset, text_columns(args))
    rows = map(_without_lone_prompt, (train_dataset, eval_dataset))
    trainer: Any = _trl_trainer(_SFTTrainer, args, model_args, *rows)
    texts = trainer.train_dataset
    if isinstance(texts, Dataset) and "input_ids" in texts.column_names and args.max_length and not args.packing:
        ids: Any = texts.with_format("arrow")[:]["input_ids"]
        if cut := _num_cut(ids, args.max_length, trainer.processing_class.eos_token_id):
            logger.warning(
                f"train_dataset: cut {cut} of {len(texts)} texts to max_length={args.max_length} tokens; the model "
                "does not learn how they end"
            )
    return trainer


def _num_cut(ids: ChunkedArray, max_length: int, eos: int) -> int:
    """Count the texts that are cut before their end.

    Args:
        ids: The tokens of all texts, an Arrow array of lists; newer versions of TRL have cut them to `max_length`.
        max_length: The largest length. A text of this length is whole if it ends in EOS or, because some chat
            templates end otherwise, in the last two tokens of a shorter text.
        eos: The EOS token.
    """
    pc: Any = compute
    lengths, tokens = pc.list_value_length(ids).to_numpy(), pc.list_flatten(ids).to_numpy().astype(np.int64)
    last = lengths.cumsum() - 1
    end_of_text = tokens[last - (lengths > 1)] << 32 | tokens[last]
    is_whole = (tokens[last] == eos) | np.isin(end_of_text, end_of_text[lengths < max_length])
    return int(((lengths > max_length) | ((lengths == max_length) & ~is_whole)).sum())


def _trl_trainer(
    trainer_class: Callable[..., Trainer],
    args: Any,
    model_args: ModelConfig,
    train_dataset: Rows | None,
    eval_dataset: Rows | None,
) -> Trainer:
    path = model_args.model_name_or_path
    if path is None:
        raise ValueError("model_name_or_path=None: give the directory or hub name of the model to train")
    is_adapter = is_adapter_directory(path)
    if not is_adapter and trainer_class is _SFTTrainer:
        of_files = {"trust_remote_code": args.trust_remote_code, "revision": model_args.model_revision}
        config: Any = load_pretrained(AutoConfig, path, "model_name_or_path", **of_files)
        if any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
            raise ValueError(
                f"model_name_or_path={path!r} is a reward model, not a language model: name the model that it was "
                "trained from"
            )
    prepare_trackers(args)
    settings = loading_settings(args.trust_remote_code, model_args) | (args.model_init_kwargs or {})
    tokenizer = load_tokenizer(path, args.trust_remote_code, "model_name_or_path", model_args.model_revision)
    set_seed(args.seed)  # determines a new head or adapter
    model, peft_config = path, lora_config(model_args)
    if is_adapter:
        if peft_config is not None:
            _say_adapter_stays(path)
        model, peft_config = _adapted_model(trainer_class, path, settings, model_args), None
    else:
        args.model_init_kwargs = settings
    trainer: Any = trainer_class(model, args, None, train_dataset, eval_dataset, tokenizer, peft_config=peft_config)
    check_start_elsewhere(starts_of([trainer.model]), str(args.output_dir))
    drop_ignored_generation_settings(trainer.model)
    use_console(trainer, "line")
    trainer.add_callback(_LogsShortRuns())
    return trainer


def _say_adapter_stays(path: str) -> None:
    print_text(
        f"{path} is an adapter: it is trained further as it is, and the options of a new adapter have no effect."
    )


def _adapted_model(trainer_class: object, path: str, settings: dict[str, object], model_args: ModelConfig) -> Any:
    """Load an adapter over its base; with `use_peft` train it further, else merge it and train all weights."""
    argument = "model_name_or_path"
    if trainer_class is _RewardTrainer:
        settings, base = {**settings, "num_labels": 1}, base_of_adapter(path)
        model = load_adapter(load_pretrained(AutoModelForSequenceClassification, base, argument, **settings), path)
    else:
        model = load_pretrained(AutoModelForCausalLM, path, argument, **settings)
    return model if model_args.use_peft else without_adapters(model)


class _LogsShortRuns(TrainerCallback):
    """Logs a short run 20 times, as PPO does, if `logging_steps` is the default."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        """Set the interval of the logs."""
        if args.logging_steps == 10:
            state.logging_steps = logging_interval(state.max_steps)


def _without_lone_prompt(dataset: Rows | None) -> Rows | None:
    """Remove a `prompt` without `completion`, which TRL would expect."""
    if dataset is None or dataset.column_names is None:
        return dataset
    is_lone = "prompt" in dataset.column_names and "completion" not in dataset.column_names
    return dataset.remove_columns("prompt") if is_lone else dataset


# ---- Running ----


class _Begun(TrainerCallback):
    """Records that training has begun; later errors are not errors of the options."""

    begun = False

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Record it."""
        self.begun = True


@contextmanager
def running(program: str, trainer: Trainer) -> Iterator[None]:
    """Turn external errors of a run into one sentence and exit code 2.

    These are: rejected options, a server that does not answer, a full disk, too little memory, numbers that are not
    finite, and a wrong result of a reward function. Other errors during training keep their traceback.

    Args:
        program: Start of the sentence.
        trainer: The trainer.

    Raises:
        SystemExit: With code 2 after such an error, 130 after Ctrl-C.
    """
    callback = _Begun()
    trainer.add_callback(callback)
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # of each file that is saved
    try:
        yield
    except KeyboardInterrupt:
        say(f"{program}: ended by SIGINT; earlier output is in {trainer.args.output_dir}")
        raise SystemExit(130) from None
    except Exception as error:
        if wants_tracebacks():
            raise
        note = note_on_memory(error)
        if note or isinstance(error, ConnectionError | DivergenceError | WrongRewardError):
            print(file=sys.stderr)  # the progress bar leaves its line unfinished
            fail(program, f"{note} ({error})" if note else str(error), on_each_rank=bool(note))
        if callback.begun:
            raise
        with user_errors(program):
            raise
    finally:
        trainer.remove_callback(callback)
        if had_bars:
            transformers_logging.enable_progress_bar()


def train_and_save(
    trainer: Trainer,
    dataset_name: str | None,
    *,
    merge: bool = False,
    show_samples: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Train, save the model with its tokenizer, log and card, upload it if requested, and print the directory.

    Args:
        trainer: The trainer.
        dataset_name: Name of the data set, for the model card.
        merge: Whether to replace a LoRA adapter by the merged model.
        show_samples: Whether a `PPOTrainer` shows a table of all samples at the end, if it shows any.
        trust_remote_code: Whether to run code of the base's repository, to merge.
    """
    args: Any = trainer.args
    is_policy = isinstance(trainer, PPOTrainer)
    dataset_name = redacted(dataset_name)  # for model cards
    if is_policy:
        trainer.dataset_name = dataset_name
    start = parse_resume(args.resume_from_checkpoint)
    if start is True and not is_policy:  # Trainer would take the newest even if a kill has left it incomplete
        start = last_complete_checkpoint(args.output_dir) or True
    trainer.train(resume_from_checkpoint=start)
    trainer.save_model(args.output_dir, _internal_call=True)  # uploaded below, with its card
    trainer.save_state()
    cast(Any, trainer).create_model_card(dataset_name=dataset_name)
    trainer.accelerator.wait_for_everyone()
    merges = merge and is_adapter_directory(args.output_dir)
    if merges and trainer.accelerator.is_main_process:
        trusts = trust_remote_code or getattr(args, "trust_remote_code", False)
        if is_policy:
            merge_adapter(args.output_dir, trainer.tokens, trusts)
        else:
            merge_adapter(args.output_dir, None, trusts, trainer.accelerator.unwrap_model(trainer.model))
        if args.push_to_hub:
            api, skipped = HfApi(token=args.hub_token), ["_*", "checkpoint-*"]
            api.upload_folder(
                repo_id=str(trainer.hub_model_id),
                folder_path=args.output_dir,
                revision=args.hub_revision,
                ignore_patterns=skipped,
                delete_patterns=[*_ADAPTER_FILES],  # of the last checkpoint, which was uploaded with its adapter
            )
    trainer.accelerator.wait_for_everyone()
    if args.push_to_hub and not merges:
        trainer.push_to_hub(dataset_name=dataset_name)
    if is_policy and show_samples and args.num_sample_generations != 0:
        trainer.generate_completions()
    if trainer.is_world_process_zero():
        where = where_results_are(args.output_dir, args.output_dir)
        print_text(where if is_policy else f"The model is in {args.output_dir}.")


_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def merge_adapter(
    directory: str, tokens: SpecialTokens | None, trust_remote_code: bool = False, trained: Any = None
) -> None:
    """Replace the adapter in a directory by its base with the adapter merged, in the base's precision.

    Args:
        directory: Output of `save_model`.
        tokens: The tokens and texts that end a policy's responses; None for other models.
        trust_remote_code: Whether to run code of the base's repository.
        trained: The model that a trainer of TRL has trained, which has set its special tokens; None: the base's stay.
    """
    is_scorer = adapter_config(directory).task_type == "SEQ_CLS"
    auto_class, head = (
        (AutoModelForSequenceClassification, {"num_labels": 1}) if is_scorer else (AutoModelForCausalLM, {})
    )
    options: Any = {"dtype": "auto", "trust_remote_code": trust_remote_code, **head}
    merged: Any = without_adapters(load_pretrained(auto_class, directory, "output_dir", **options))
    if trained is not None:
        _copy_special_tokens(transformers_model(trained), merged)
    drop_ignored_generation_settings(merged)
    with nullcontext() if tokens is None else stopping_as_trained(merged, tokens):
        merged.save_pretrained(directory)
    card = Path(directory, CARD)
    if card.is_file():
        write_text(
            card, card.read_text(encoding="utf-8").replace("library_name: peft", "library_name: transformers", 1)
        )
    for name in _ADAPTER_FILES:  # last: without them a failed save would lose it
        os.remove(os.path.join(directory, name))


def _copy_special_tokens(trained: Any, merged: Any) -> None:
    """Give a merged model the special tokens that TRL's trainer has set in the trained one."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for part in ("config", "generation_config"):
            source, target = getattr(trained, part, None), getattr(merged, part, None)
            if source is not None and target is not None:
                setattr(target, name, getattr(source, name, None))
