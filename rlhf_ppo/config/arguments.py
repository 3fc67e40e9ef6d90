"""Groups of arguments of `PPOConfig`: engine, logs and health checks, published recipes, tools and environments."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rlhf_ppo.config.validation import (
    LONGEST_WAIT,
    AtLeastOne,
    AtLeastOneFloat,
    Count,
    Interval,
    NotNegative,
    Port,
    Positive,
    PositiveShare,
    Share,
)
from rlhf_ppo.config.validation import option as _option


def is_vllm_available() -> bool:
    """Return whether TRL finds an installed vLLM that it supports."""
    from trl.import_utils import is_vllm_available

    return is_vllm_available()


@dataclass(repr=False)
class EngineArguments:
    """Arguments of the generation engine; the `vllm_*` fields have the names and meanings of TRL's `GRPOConfig`.

    The `vllm_*` fields have an effect with `generation_engine="vllm"` only.
    """

    generation_engine: Literal["transformers", "continuous", "vllm"] = _option(
        "transformers",
        "Engine that generates responses: 'transformers' (`generate`), 'continuous' (transformers' continuous "
        "batching: a new prompt replaces each response that ends) or 'vllm' (through TRL).",
    )
    importance_sampling_correction: bool = _option(
        True,
        "Weight each token's policy loss by the ratio of its probabilities in training and in the engine (truncated "
        "importance sampling). Needs log-probabilities of the sampler: generation_engine 'continuous' or 'vllm'.",
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
        "Seconds to wait for the vLLM server's health check: at the start, and while it generates or loads weights. "
        "One request may take ddp_timeout seconds.",
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
        "Check the logs for signs of failing training, warn once of each with the option to change, and log "
        "health/<check> (0 or 1).",
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
        "Target KL of a response, in nats. After each update kl_coef changes towards it, by at most a fifth times the "
        "update's share of kl_horizon (arXiv 1909.08593, section 2.2). None: kl_coef is constant.",
    )
    kl_horizon: AtLeastOneFloat = _option(
        10_000,
        "Episodes over which kl_coef adapts to kl_target; fewer episodes adapt faster. An update counts as at most "
        "one horizon, so values below batch_size have the same effect.",
    )
    kl_stop: Positive | None = _option(
        None,
        "End an update's epochs once the KL to the sampling policy, in nats per token, exceeds this value: the mean "
        "of k3 over an epoch (http://joschu.net/blog/kl-approx.html). None: always num_ppo_epochs.",
    )

    # --- Scores and values ---
    score_scaling: bool = _option(
        False, "Divide scores by the standard deviation of all scores of the run so far, over all processes."
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
        "Save the value model too, in the directory critic beside the policy, to load it with "
        "AutoModelForSequenceClassification.",
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
        "uses as many rows as the mini-batch has episodes (arXiv 2203.02155). 0: no such loss.",
    )
    loss_aggregation: Literal["token", "sequence"] = _option(
        "token",
        "Aggregation of the policy's token losses in a mini-batch: 'token', the mean over all tokens; 'sequence', "
        "the mean within each response, then over responses.",
    )


def check_warmup_length(args: RecipeArguments, num_updates: int) -> None:
    """Raise a `ValueError` if critic warm-up lasts for the whole run."""
    if args.critic_warmup_steps >= num_updates > 0:
        raise ValueError(
            f"critic_warmup_steps={args.critic_warmup_steps} is the whole run of {num_updates} updates, so the policy "
            "would not learn; lower it"
        )


def check_recipes(args: RecipeArguments, kl_coef: float) -> None:
    """Raise a `ValueError` if options of recipes contradict `kl_coef`."""
    if args.kl_target is not None and kl_coef == 0:
        raise ValueError(
            f"kl_target={args.kl_target} multiplies kl_coef=0, which stays 0; start from a positive kl_coef"
        )


# Tools and environments


@dataclass(repr=False)
class AgentArguments:
    """Arguments of `tools` and `environment_factory`; TRL's names where TRL has them."""

    max_tool_calling_iterations: Count | None = _option(
        None,
        "Maximum number of rounds of tool calls in an episode. A later turn with calls cuts the episode; its calls do "
        "not run. None: no limit.",
    )
    tool_timeout: Annotated[float, Interval(0, LONGEST_WAIT, open_low=True)] | None = _option(
        60.0, "Seconds that a call of a tool or an environment may take; then its answer is an error. None: no limit."
    )
    chat_template_kwargs: dict[str, Any] | str | None = _option(
        None,
        "Further arguments of the chat template, a dict or its JSON text, such as '{\"enable_thinking\": false}'.",
    )
