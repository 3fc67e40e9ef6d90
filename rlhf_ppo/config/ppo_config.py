"""`PPOConfig`, the arguments of a run, checked before anything is loaded; batch sizes and number of updates."""

import functools
import math
import os
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal, cast, get_type_hints

import torch
from transformers import TrainingArguments

from rlhf_ppo.config.checks import (
    INHERITED_RANGES,
    LONGEST_WAIT,
    AtLeastOne,
    AtLeastOneFloat,
    Count,
    EngineName,
    ExplainsUnknown,
    Finite,
    Interval,
    NotNegative,
    Port,
    Positive,
    PositiveShare,
    Share,
    ShareBelowOne,
    Temperature,
    check_divides,
    check_kl,
    check_num_prompts,
    check_ranges,
    check_total_episodes,
    check_type,
    check_warmup_length,
    choose_bf16,
    made_of,
    parse_object,
    parse_strings,
    parse_weights,
    python_number,
    ranges_of,
    reject_unsupported,
)
from rlhf_ppo.config.checks import option as _option
from rlhf_ppo.terminal import RedactsSecrets


@dataclass(frozen=True)
class Sizes:
    """Batch sizes and number of updates of a run, from its arguments and the numbers of processes and prompts.

    ```
    local_batch_size = per_device x accumulation        batch_size      = local_batch_size x world_size
    micro_batch_size = per_device x world_size          mini_batch_size = batch_size / num_mini_batches
    ```

    Attributes:
        world_size: Processes that train together.
        local_batch_size: Episodes of an update on each process.
        micro_batch_size: Episodes of one forward and backward pass, on all processes.
        batch_size: Episodes of an update, on all processes.
        local_mini_batch_size: Episodes of an optimizer step on each process.
        mini_batch_size: Episodes of an optimizer step, on all processes.
        num_total_batches: Updates of the run.
        total_episodes: Requested number of episodes; every update has a full batch.
    """

    world_size: int
    local_batch_size: int
    micro_batch_size: int
    batch_size: int
    local_mini_batch_size: int
    mini_batch_size: int
    num_total_batches: int
    total_episodes: int


def run_length(
    batch_size: int,
    episodes_of_pass: int | None,
    num_train_epochs: float,
    max_steps: int | None,
    total_episodes: int | None,
) -> tuple[int, int]:
    """Compute the numbers of updates and episodes of a run; every update has a full batch.

    ```
    num_total_batches = max_steps if set, else ceil(total_episodes / batch_size)
    total_episodes    = itself if set, else max_steps x batch_size if set, else num_train_epochs x episodes_of_pass
    ```

    Args:
        batch_size: Episodes per update.
        episodes_of_pass: Episodes of a pass over the training set, or None if it has no length.
        num_train_epochs: Passes over the training set; need not be whole.
        max_steps: Number of updates; not set if None or not positive.
        total_episodes: Number of episodes, or None.

    Returns:
        `num_total_batches` and `total_episodes`.

    Raises:
        ValueError: `max_steps` and `total_episodes` disagree, or the length of the run is unknown.
    """
    if max_steps is not None and max_steps > 0:
        if total_episodes is not None and math.ceil(total_episodes / batch_size) != max_steps:
            raise ValueError(
                f"max_steps={max_steps} and total_episodes={total_episodes} contradict each other: {max_steps} "
                f"updates of {batch_size} episodes make {max_steps * batch_size}; set only one of them"
            )
        return max_steps, total_episodes or max_steps * batch_size
    if total_episodes is None and episodes_of_pass is None:
        raise ValueError("the training set has no length, so max_steps or total_episodes must be set")
    if total_episodes is None:
        total_episodes = max(1, int(num_train_epochs * (episodes_of_pass or 0)))
    return math.ceil(total_episodes / batch_size), total_episodes


def is_vllm_available() -> bool:
    """Return whether TRL finds an installed vLLM that it supports."""
    from trl.import_utils import is_vllm_available

    return is_vllm_available()


@dataclass(repr=False)
class EngineArguments:
    """Arguments of the generation engine; the `vllm_*` fields have the names and meanings of TRL's `GRPOConfig`.

    The `vllm_*` fields have an effect with `generation_engine="vllm"` only.
    """

    generation_engine: EngineName = _option(
        "transformers",
        "Engine that generates responses: 'transformers' (`generate`), 'continuous' (transformers' continuous "
        "batching: a new prompt replaces each response that ends) or 'vllm' (through TRL).",
    )
    importance_sampling_correction: bool = _option(
        True,
        "Weight each token's policy loss by the ratio of its probabilities in training and in the engine (truncated "
        "importance sampling). Needs the sampler's log-probabilities: of 'continuous', 'vllm', your own engine, "
        "rollout_func or step.",
    )
    importance_sampling_clip_max: Positive = _option(
        2.0, "Largest weight of importance_sampling_correction; larger weights are clipped."
    )
    vllm_mode: Literal["colocate", "server"] = _option(
        "colocate", "'colocate': vLLM runs in the training processes; 'server': it runs in a separate server."
    )
    vllm_server_base_url: str | None = _option(
        None, "URL of the vLLM server, such as http://localhost:8000; replaces vllm_server_host and vllm_server_port."
    )
    vllm_server_host: str = _option("0.0.0.0", "Host of the vLLM server.")
    vllm_server_port: Port = _option(8000, "Port of the vLLM server.")
    vllm_server_timeout: Annotated[float, Interval(0, LONGEST_WAIT)] = _option(
        240.0,
        "Seconds to wait at the start until the vLLM server answers. Later requests have no time limit.",
    )
    vllm_group_port: Port = _option(51216, "Port through which the vLLM server receives the policy's weights.")
    vllm_gpu_memory_utilization: PositiveShare = _option(
        0.3, "Share of the device's memory for the weights and cache of a colocated vLLM."
    )
    vllm_max_model_length: AtLeastOne | None = _option(
        None, "Maximum length of prompt and response in a colocated vLLM, in tokens; None: the model's own limit."
    )
    vllm_tensor_parallel_size: AtLeastOne = _option(
        1, "Processes over which a colocated vLLM splits the model; must divide the number of processes."
    )
    vllm_enable_sleep_mode: bool = _option(
        False, "Free a colocated vLLM's memory during learning; its weights are sent again before each use."
    )
    vllm_model_impl: Literal["auto", "vllm", "transformers"] = _option(
        "vllm", "Library whose implementation of the model a colocated vLLM runs."
    )

    def check_engine(self) -> None:
        """Raise a `ValueError` if the selected engine is not installed."""
        if self.generation_engine == "vllm" and not is_vllm_available():
            raise ValueError(
                "generation_engine='vllm' needs vLLM, which is not installed; `pip install \"rlhf-ppo[vllm]\"`, or "
                "set generation_engine to 'continuous' or 'transformers'"
            )


def logging_interval(num_updates: int) -> int:
    """Return the default of `logging_steps`: 10, or less where a run would have fewer than 20 logs."""
    return min(10, max(1, num_updates // 20))


@dataclass(repr=False)
class LoggingArguments:
    """Arguments of the terminal output and the health checks.

    Trackers and `trainer_state.json` always get every metric, whatever `log_console` is.
    """

    log_console: Literal["line", "full", "none"] = _option(
        "line",
        "Terminal output of a log: 'line', the most important metrics, with a table at the end of the run; 'full', "
        "all metrics as a dict, as Trainer prints them; 'none', nothing.",
    )
    health_checks: bool = _option(
        True,
        "Check each log for signs of failing training: warn with the option to change, and log health/<check> "
        "(0 or 1).",
    )


@dataclass(repr=False)
class RecipeArguments:
    """Options of published recipes; all are off by default and then do not change any number."""

    num_generations: AtLeastOne = _option(
        1,
        "Responses to each prompt of an update, such as 16. An update then has batch_size / num_generations prompts, "
        "and a pass over the data num_generations times as many episodes.",
    )

    kl_target: Positive | None = _option(
        None,
        "Target KL of a response, in nats: each update scales kl_coef up or down, by at most 0.2 x its episodes / "
        "kl_horizon (arXiv 1909.08593, section 2.2). None: kl_coef is constant.",
    )
    kl_horizon: AtLeastOneFloat = _option(
        10_000,
        "Episodes over which kl_coef adapts to kl_target; fewer adapt faster. Values below batch_size have the same "
        "effect as batch_size.",
    )
    kl_stop: Positive | None = _option(
        None,
        "Stop the update after an epoch in which the mean KL to the sampling policy exceeds this value (k3 estimate, "
        "nats per token, http://joschu.net/blog/kl-approx.html). It is measured before each step, so with "
        "num_mini_batches=1 the first epoch measures 0. None: always num_ppo_epochs.",
    )

    # --- Scores and values ---
    score_scaling: bool = _option(
        False,
        "Divide scores by the standard deviation of all scores of the run so far, over all processes, without those "
        "that missing_eos_score replaces.",
    )

    critic_learning_rate: NotNegative | None = _option(
        None,
        "Learning rate of the value model, with the schedule of learning_rate, such as 1e-5 with learning_rate 1e-6. "
        "None: learning_rate.",
    )
    critic_warmup_steps: Count = _option(
        0,
        "PPO updates at the start of a run that train only the value model, on returns with lambda 1, such as 10; "
        "the policy does not change (arXiv 2503.01491, 2504.05118).",
    )

    save_critic: bool = _option(
        False,
        "Save the value model too, in the directory critic beside the policy, for value_model; the head of "
        "value_model='policy' is always saved.",
    )

    # --- Advantages ---
    lam_policy: Share | None = _option(None, "Lambda of the advantages only, such as 0.95. None: lam.")
    lam_critic: Share | None = _option(
        None, "Lambda of the value model's returns, such as 1 (arXiv 2504.05118). None: lam."
    )

    gae_level: Literal["token", "turn"] = _option(
        "token",
        "Action of GAE: a 'token', or a 'turn', the policy's tokens between two answers of a tool or an environment; "
        "gamma and the lambdas are then per turn (arXiv 2512.17008).",
    )

    # --- Arithmetic ---
    lm_head_float32: bool = _option(
        False,
        "With bf16 or fp16: multiply hidden states by the language-model head in float32, in sampling, "
        "log-probabilities and learning (arXiv 2506.13585, 2510.13786). Not inside vLLM. No effect in float32 runs.",
    )

    # --- Losses ---
    policy_loss: str = _option(
        "ppo",
        "Policy loss per token: 'ppo', or a function (logprobs, experience, args), as 'path/file.py:function' or "
        "'package.module.function'. examples/policy_losses.py has GSPO, CISPO and a dual clip.",
    )
    cliprange: Positive = _option(0.2, "Clip range of the importance ratio: [1 - cliprange, 1 + cliprange].")
    cliprange_value: Positive | None = _option(
        0.2, "Clip range of a value around the rollout's estimate; None or inf: no clipping."
    )
    cliprange_high: Positive | None = _option(
        None,
        "Upper clip range of the importance ratio, such as 0.28; cliprange is then the lower one (arXiv 2503.14476). "
        "None: cliprange.",
    )
    entropy_coef: NotNegative = _option(0.0, "Weight of the entropy bonus: the policy's mean entropy per token.")
    ptx_coef: NotNegative = _option(
        0.0,
        "Weight of a pretraining loss: the mean negative log-likelihood of tokens of ptx_dataset. Each optimizer step "
        "uses as many rows as the mini-batch has episodes (arXiv 2203.02155). 0: off.",
    )
    loss_aggregation: Literal["token", "sequence"] = _option(
        "token",
        "Aggregation of the policy's token losses in a mini-batch: 'token', the mean over all tokens; 'sequence', "
        "the mean within each response, then over responses.",
    )


@dataclass(repr=False)
class AgentArguments:
    """Arguments of `tools` and `environment_factory`; TRL's names where TRL has them."""

    max_tool_calling_iterations: Count | None = _option(
        None,
        "Maximum number of rounds of tool calls in an episode. A later turn with calls cuts the episode; its calls do "
        "not run. None: no limit.",
    )
    tool_timeout: Annotated[float, Interval(0, LONGEST_WAIT, open_low=True)] | None = _option(
        60.0,
        "Seconds for a call; then a tool answers with an error; a sync tool of an environment, or `respond`, cuts "
        "the episode. None: no limit.",
    )
    chat_template_kwargs: dict[str, Any] | str | None = _option(
        None,
        "Further arguments of the chat template, a dict or its JSON text, such as '{\"enable_thinking\": false}'.",
    )


# Some fields intentionally replace those of TrainingArguments (a property, or types without None).
# pyright: reportIncompatibleVariableOverride=false, reportIncompatibleMethodOverride=false


@dataclass(repr=False)  # RedactsSecrets' own hides tokens
class PPOConfig(
    RedactsSecrets,
    ExplainsUnknown,
    LoggingArguments,
    RecipeArguments,
    AgentArguments,
    EngineArguments,
    TrainingArguments,
):
    """Arguments of `PPOTrainer`: those of `transformers.TrainingArguments` and PPO's own.

    Each field's `help` is its documentation; `HfArgumentParser` and `TrlParser` can set all of them. Unlike in
    `TrainingArguments`, `learning_rate` is 3e-6, `logging_steps` 10, `gradient_checkpointing` and
    `dataloader_drop_last` are True, `bf16` is the launcher's, else True if the device supports it, and the best model
    has the highest "score".

    One step of the trainer is one PPO update, on `batch_size` episodes. Fields whose help begins with "Derived" show
    the trainer's `sizes`, and are None until a trainer exists; `world_size` is a property in TrainingArguments.

    Inherited arguments that PPO does not support, or that `TrainingArguments` no longer has, are errors: see
    `rlhf_ppo.config.checks`.

    Raises:
        TypeError: An argument has the wrong type, or is one that `TrainingArguments` no longer has.
        ValueError: An argument is out of its range, contradicts another or is not supported.
    """

    # --- Inherited, with other defaults ---
    learning_rate: float = _option(3e-6, "Initial learning rate.")
    logging_steps: float = _option(
        10,
        "PPO updates between two logs; below 1, a share of all updates, such as 0.1. With 10, the default, a run of "
        "20 to 199 updates logs 20 to 39 times, a shorter one each update. If eval_steps is not set, it "
        "is the same; with load_best_model_at_end, the number that you set here, or 10.",
    )
    gradient_checkpointing: bool = _option(
        True, "Recompute activations in the backward pass: less memory, one more forward pass."
    )
    bf16: bool | None = _option(
        None,
        "Compute in bfloat16. If not set: the launcher's, else True if the device supports it and fp16 is not set.",
        nargs="?",
        const=True,
    )
    dataloader_drop_last: bool = _option(True, "Drop the last, smaller batch of an epoch; False is an error.")
    warmup_ratio: ShareBelowOne | None = _option(
        None, "Share of all updates in which the learning rate rises, if warmup_steps is not set."
    )
    metric_for_best_model: str | None = _option(
        None, "Figure of an evaluation that compares models, with or without `eval_`; None: the score."
    )
    greater_is_better: bool | None = _option(
        None, "Whether a larger figure is better; None: yes, unless its name ends in `loss`."
    )
    restore_callback_states_from_checkpoint: bool = _option(True, "Restore the counters of callbacks on a resume.")

    # --- Experiment, models, data ---
    exp_name: str = _option("ppo_config", "Name of the experiment; run_name is $WANDB_NAME or <exp_name>__<seed>.")
    overwrite_output_dir: bool = _option(
        False,
        "Delete the checkpoints in output_dir when training starts. Without it, a directory with checkpoints is an "
        "error unless resume_from_checkpoint is set. Other files in it are kept.",
    )
    sft_model_path: str = _option("EleutherAI/pythia-160m", "Path of the SFT model: initial policy, and reference.")
    reward_model_path: str = _option("EleutherAI/pythia-160m", "Path of the reward model.")
    model_adapter_name: str | None = _option(None, "Name of the PEFT adapter to train, if there are several.")
    ref_adapter_name: str | None = _option(None, "Name of the PEFT adapter that is the reference.")
    share_base_model: bool = _option(
        False,
        "Load the base of a LoRA policy once and share it with the value model, which gets its own adapter, and with "
        "reward models that are adapters of the same base.",
    )
    offload_frozen: bool = _option(
        False,
        "Keep the weights of reference and reward models on the CPU, and move them to the device only for each use.",
    )
    share_prefixes: bool | None = _option(
        None,
        "Compute a common beginning of several rows once; results change by rounding only. None: on CPUs. True: also "
        "on accelerators (never measured), except with flash attention or padded rows.",
    )
    dataset_num_proc: Annotated[int, Interval(1, 1024)] | None = _option(None, "Processes that tokenize the dataset.")
    max_prompt_length: AtLeastOne | None = _option(
        None, "Maximum length of a prompt, in tokens; longer prompts are dropped. None: no limit."
    )

    # --- Rollout ---
    total_episodes: AtLeastOne | None = _option(
        None,
        "Episodes of the whole run, rounded up to whole updates. If not set: num_train_epochs x number of prompts x "
        "num_generations.",
    )
    response_length: AtLeastOne = _option(53, "Maximum length of a response, in tokens.")
    temperature: Temperature = _option(0.7, "Sampling temperature; divides the logits in every log-probability.")
    top_k: Count = _option(0, "Sample from the k most likely tokens; 0: from all tokens.")
    top_p: PositiveShare = _option(
        1.0, "Sample from the most likely tokens whose probabilities sum to p; 1: from all tokens."
    )
    min_p: Share | None = _option(
        None, "Sample from tokens at least min_p times as likely as the likeliest token; None: from all tokens."
    )
    stop_token: Literal["eos"] | None = _option(
        None, "'eos': the EOS token ends a response, the default of `rlhf-ppo train`. Other tokens: stop_token_id."
    )
    stop_token_id: Count | None = _option(None, "Id of the token that ends a response; not together with stop_token.")
    stop_strings: list[str] | None = _option(
        None,
        "Texts that end a response, after the token that completes the text: several values, "
        """or a JSON list such as '["Question:", "\\n"]' with a line break. Texts in the prompt do not count.""",
    )
    local_rollout_forward_batch_size: AtLeastOne = _option(
        64, "Rows that each process generates, or evaluates, at once in the rollout."
    )
    ds3_gather_for_generation: bool = _option(
        True,
        "With DeepSpeed ZeRO-3, gather the policy's weights for generation: faster, but the whole policy must fit on "
        "one device.",
    )
    num_sample_generations: Count = _option(
        10, "Tables of samples to print, the first before training, the last after it; 1: only the last; 0: none."
    )

    # --- Reward ---
    # HfArgumentParser reads the second of several types from the command line.
    reward_weights: list[float] | str | dict[str, float] | None = _option(
        None,
        "Weight of each reward: a list, reward models first, then reward_funcs in their order; or a dict by name, "
        "with 'reward_model' for a reward model and a function's own name; or either as JSON text. None: all 1.",
        nargs="+",
    )
    score_clip: Positive | None = _option(
        None,
        "Clip the summed score to [-score_clip, score_clip], after score_scaling (then in standard "
        "deviations), before missing_eos_penalty or missing_eos_score.",
    )
    missing_eos_penalty: Positive | None = _option(
        None, "Penalty on the score of a response that has neither stop token nor stop string."
    )
    missing_eos_score: Finite | None = _option(
        None,
        "Score of every response that has neither stop token nor stop string, such as -1 (the EOS trick of arXiv "
        "2403.17031); not together with missing_eos_penalty. With score_scaling, both options are in standard "
        "deviations.",
    )
    bootstrap_truncated: bool = _option(
        False,
        "If response_length truncates a response (no stop token or string), bootstrap its return from the value "
        "estimate at its end instead of 0.",
    )
    kl_coef: NotNegative = _option(0.05, "Coefficient of the per-token KL penalty, in reward per nat.")
    kl_estimator: Literal["k1", "k3"] = _option(
        "k1",
        "KL estimator in the reward: 'k1', the log-ratio, gives the gradient of the KL; 'k3', never negative, does "
        "not optimise the KL-regularised reward and can end below the untrained policy (arXiv 2512.21852).",
    )
    whiten_rewards: bool = _option(False, "Scale the token rewards to variance 1, with their mean unchanged.")

    # --- Optimization ---
    num_ppo_epochs: Annotated[int, Interval(1, 1000)] = _option(4, "Passes over each rollout.")
    num_mini_batches: AtLeastOne = _option(1, "Mini-batches per pass; each is one optimizer step.")
    max_tokens_per_micro_batch: AtLeastOne | None = _option(
        None,
        "Maximum tokens of a forward and backward pass, prompts included, instead of per_device_train_batch_size "
        "episodes. A pass holds whole episodes; a longer episode gets its own pass.",
    )
    gamma: Share = _option(1.0, "Discount factor per token.")
    lam: Share = _option(0.95, "Lambda of generalized advantage estimation.")
    vf_coef: NotNegative = _option(0.1, "Weight of the value loss.")

    # --- Derived: the trainer's sizes under TRL's names ---
    world_size: int | None = _option(None, "Derived: processes.")
    local_batch_size: int | None = _option(
        None, "Derived: episodes per update and process: per_device_train_batch_size x gradient_accumulation_steps."
    )
    micro_batch_size: int | None = _option(None, "Derived: per_device_train_batch_size x world_size.")
    batch_size: int | None = _option(None, "Derived: episodes per update: local_batch_size x world_size.")
    local_mini_batch_size: int | None = _option(None, "Derived: local_batch_size / num_mini_batches.")
    mini_batch_size: int | None = _option(None, "Derived: batch_size / num_mini_batches.")
    num_total_batches: int | None = _option(None, "Derived: PPO updates: total_episodes / batch_size, rounded up.")

    def __post_init__(self) -> None:
        """Resolve defaults that depend on other fields, validate, and let TrainingArguments set up the devices."""
        self.derived_values: dict[str, Any] = {}
        self.bf16 = choose_bf16(self)
        if self.warmup_ratio is not None and self.warmup_steps == 0:
            self.warmup_steps = self.warmup_ratio
        self.cliprange_value = None if self.cliprange_value == math.inf else self.cliprange_value
        self.max_grad_norm = self.max_grad_norm or 0.0  # None, which clips nothing, too
        if self.metric_for_best_model is None and self.compares_models():
            self.metric_for_best_model = "score"
        self.validate()
        self._mirror_checkpointing()
        world_size, follows_logs = self.world_size, not self.eval_steps and not self.load_best_model_at_end
        super().__post_init__()
        self.world_size = world_size
        if follows_logs and self.eval_steps is not None:  # not checked against `save_steps`
            self.derived_values["eval_steps"] = self.eval_steps
        self.validate()  # again: TrainingArguments has parsed accelerator_config

    def _mirror_checkpointing(self) -> None:
        """Copy `gradient_checkpointing` to its new name, if transformers has one and the user did not set it."""
        for old, new in (
            ("gradient_checkpointing", "activation_checkpointing"),
            ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        ):
            if getattr(self, new, False) is None:
                setattr(self, new, getattr(self, old))

    def compares_models(self) -> bool:
        """Return whether `metric_for_best_model` is used."""
        by_metric = self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        return self.load_best_model_at_end or self.save_strategy == "best" or by_metric

    @functools.cached_property
    def _setup_devices(self) -> torch.device:
        """Set up the devices, and `world_size`, which TrainingArguments then reads for DeepSpeed."""
        device = super()._setup_devices
        self.world_size = self._num_processes()
        return device

    def _num_processes(self) -> int:
        state: Any = self.distributed_state
        return 1 if state is None else state.num_processes

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """`chat_template_kwargs`, which `validate` has parsed."""
        return cast(Any, self.chat_template_kwargs)

    def validate(self) -> None:
        """Check every field's type and range, and those that exclude each other.

        Raises:
            TypeError: A field has the wrong type.
            ValueError: A field is out of its range, contradicts another or is not supported.
        """
        self.reward_weights = parse_weights(self.reward_weights)
        self.stop_strings = parse_strings("stop_strings", self.stop_strings)
        self.chat_template_kwargs = parse_object(
            "chat_template_kwargs", self.chat_template_kwargs, '{"enable_thinking": false}'
        )
        helps = {field.name: str(field.metadata.get("help", "")) for field in fields(self)}
        for name in RANGES:
            setattr(self, name, python_number(getattr(self, name)))
        for name, annotation in _ppo_annotations().items():
            check_type(name, getattr(self, name), annotation, helps[name])
        reject_unsupported(self)
        check_ranges(self, RANGES)
        for names in EXCLUSIVE:
            values = {name: getattr(self, name) for name in names}
            if not any(value is None or value is False for value in values.values()):
                shown = " and ".join(f"{name}={value!r}" for name, value in values.items())
                raise ValueError(f"{shown} exclude each other; set only one of them")
        self.check_engine()
        check_kl(self.kl_target, self.kl_coef)
        of_process = (self.per_device_train_batch_size, self.gradient_accumulation_steps)
        for name in ("num_mini_batches", "num_generations"):
            check_divides(name, getattr(self, name), *of_process)
        check_total_episodes(self.user_value("total_episodes"), *of_process, num_processes=1)

    def count_sizes(self, num_processes: int, num_examples: int | None) -> Sizes:
        """Compute the sizes of a run from the fields that the user set, ignoring those that `fill_derived` wrote.

        Args:
            num_processes: Processes that train together.
            num_examples: Prompts of the training set, or None if it has no length.

        Raises:
            ValueError: The training set is smaller than one batch, the length of the run is unknown or given twice, or
                a derived field was set to a number that contradicts the others.
        """
        self.validate()
        of_process = per_device, accumulation = self.per_device_train_batch_size, self.gradient_accumulation_steps
        max_steps, total_episodes = self.user_value("max_steps"), self.user_value("total_episodes")
        check_total_episodes(total_episodes, *of_process, num_processes)
        local = per_device * accumulation
        batch, of_pass = local * num_processes, None
        if num_examples is not None:
            of_pass = num_examples * self.num_generations
            factors = f"{made_of(*of_process)} x {num_processes} processes"
            check_num_prompts(num_examples, batch, self.num_generations, factors, self.max_prompt_length)
        num_updates, num_episodes = run_length(batch, of_pass, self.num_train_epochs, max_steps, total_episodes)
        sizes = Sizes(
            world_size=num_processes,
            local_batch_size=local,
            micro_batch_size=per_device * num_processes,
            batch_size=batch,
            local_mini_batch_size=local // self.num_mini_batches,
            mini_batch_size=batch // self.num_mini_batches,
            num_total_batches=num_updates,
            total_episodes=num_episodes,
        )
        check_warmup_length(self.critic_warmup_steps, num_updates)
        for name, size in asdict(sizes).items():
            if self.user_value(name) not in (None, size) and name != "total_episodes":
                raise ValueError(
                    f"{name}={getattr(self, name)} was set, but the other arguments result in {size}; leave it None"
                )
        return sizes

    def fill_derived(self, num_processes: int, num_examples: int | None) -> Sizes:
        """Compute the sizes of a run; set the unset derived fields, `max_steps`, `run_name` and `logging_steps`.

        Unset `eval_steps` become `logging_steps`, except with `load_best_model_at_end`.

        The trainer calls it before `Trainer.__init__`, which reads the world size, and again when training starts.
        Training reads the returned `Sizes`; the fields are for trackers, logs and model cards.

        Args:
            num_processes: Processes that train together.
            num_examples: Prompts of the training set, or None if it has no length.

        Raises:
            ValueError: As `count_sizes` does; no field is changed then.
        """
        sizes = self.count_sizes(num_processes, num_examples)
        num_updates = sizes.num_total_batches
        shown = {
            "max_steps": num_updates,
            "run_name": os.environ.get("WANDB_NAME") or f"{self.exp_name}__{self.seed}",
            "logging_steps": logging_interval(num_updates),
        } | asdict(sizes)
        if "eval_steps" in self.derived_values:
            shown["eval_steps"] = self.user_value("logging_steps") or shown["logging_steps"]
        self.derived_values = {name: value for name, value in shown.items() if self.user_value(name) is None}
        for name, value in self.derived_values.items():
            setattr(self, name, value)
        return sizes

    def user_value(self, name: str) -> Any:
        """Return the value that the user set; None if it is unset or comes from `fill_derived`."""
        value = getattr(self, name)
        unset = (name == "max_steps" and value <= 0) or (name == "logging_steps" and value == 10)
        return None if unset or value == self.derived_values.get(name) else value

    def main_process_first(self, local: bool = True, desc: str = "work") -> AbstractContextManager[None]:
        """Let the main process run the block first; set `world_size`, which TrainingArguments compares with 1."""
        if self.world_size is None:
            self.world_size = self.derived_values["world_size"] = self._num_processes()
        return super().main_process_first(local, desc)


RANGES = ranges_of(PPOConfig) | INHERITED_RANGES
"""Range of each numeric argument."""

EXCLUSIVE = (
    ("stop_token", "stop_token_id"),
    ("missing_eos_penalty", "missing_eos_score"),
    ("share_prefixes", "torch_compile"),
)
"""Pairs of arguments that exclude each other."""

NOT_OF_TRAINING = frozenset(
    {
        *("output_dir", "overwrite_output_dir", "logging_dir", "run_name", "exp_name", "hub_model_id", "local_rank"),
        *("resume_from_checkpoint", "disable_tqdm", "report_to", "log_level", "log_level_replica", "log_console"),
        *("health_checks", "dataset_num_proc"),
    }
)
"""Arguments that change no number of training: paths, names and display."""


@functools.cache
def _ppo_annotations() -> dict[str, Any]:
    """Return the type of each field that `TrainingArguments` does not have."""
    hints, of_parent = get_type_hints(PPOConfig), {field.name for field in fields(TrainingArguments)}
    return {field.name: hints[field.name] for field in fields(PPOConfig) if field.name not in of_parent}
