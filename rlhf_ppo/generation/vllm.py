"""Generation with vLLM, in the training process (colocated) or on a server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.images import IMAGES_COLUMN
from rlhf_ppo.data.rollout import PositionLimit, Prompts, selected
from rlhf_ppo.generation.protocol import Sampled, stack_rows
from rlhf_ppo.generation.sampling import length_and_filling, stop_tokens
from rlhf_ppo.models.adapters import preserve_base, unties_embeddings
from rlhf_ppo.models.loading import is_quantized
from rlhf_ppo.models.unwrapping import is_peft_model, multiplied_dtype, text_config
from rlhf_ppo.ranks.processes import get_logger, raise_on_all_ranks
from rlhf_ppo.ranks.random_streams import isolated_rng
from rlhf_ppo.terminal import redact_url, redact_urls

if TYPE_CHECKING:
    from trl.generation.vllm_generation import VLLMGeneration

logger = get_logger(__name__)

OPTIONS = (
    *("mode", "server_base_url", "server_host", "server_port", "server_timeout", "group_port"),
    *("tensor_parallel_size", "gpu_memory_utilization", "max_model_length", "enable_sleep_mode", "model_impl"),
)
"""Arguments of TRL's `VLLMGeneration` whose option is `vllm_` and their name."""

MAX_BIASED_IDS = 1024
"""Largest number of suppressed ids of a request: `MAX_NUM_LOGIT_BIAS_TOKENS` of vLLM's runner for GPUs."""


@contextmanager
def naming_server(address: str) -> Iterator[None]:
    """Name the server in errors of TRL's client, without the user, password and query of its address."""
    try:
        yield
    except Exception as error:
        if not address:
            raise
        reason = redact_urls(str(error))[:1000]
        raise ConnectionError(
            f"the vLLM server at {redact_url(address)} cannot be used: {reason}. Look at its log, start it again, and "
            "continue with resume_from_checkpoint=True"
        ) from error


class VLLMEngine:
    """vLLM with a copy of the policy's weights, which are sent before the first response after each change.

    Args:
        vllm: TRL's `VLLMGeneration`.
        longest_sequence: Longest prompt plus response that this vLLM accepts, or None if unknown.
        address: URL of the server; empty if vLLM is colocated.
    """

    reads_sharded = True
    called = "generation_engine='vllm'"
    cut_rows_advice = (
        "raise vllm_max_model_length, or the server's --max-model-len, to the sum of both, or lower response_length"
    )

    def __init__(self, vllm: VLLMGeneration, longest_sequence: PositionLimit | None = None, address: str = "") -> None:
        self.vllm, self.longest_sequence, self.address = vllm, longest_sequence, address
        self._is_current = False

    def sample(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Sampled:
        """Generate a response to each prompt; every rank makes the same calls.

        Args:
            policy: The policy that the engine was made for; its weights are read by TRL's adapter.
            prompts: `B` left-padded prompts; ids under the mask are ignored.
            config: The sampling distribution, the stop token (or several) and the length limit.

        Returns:
            The responses and their log-probabilities.

        Raises:
            ConnectionError: The server has died or refuses the request.
            ValueError: More ids must not be sampled than vLLM can suppress.
        """
        self._set_sampling(policy, config)
        with naming_server(self.address):
            if not self._is_current or self._sleeps:
                with preserve_base(policy):  # TRL's adapter merges, sends and unmerges
                    self.vllm.sync_weights()
                self._is_current = True
            with self._same_random_numbers():
                shown = prompts.columns.get(IMAGES_COLUMN)
                images = None if shown is None else [[*row.pictures] or None for row in shown]
                rows = selected(prompts.input_ids, prompts.attention_mask)
                _, ids, logprobs, _ = self.vllm.generate(rows, images=images, num_generations=1)
        values = [[_number(token) for token in row] for row in logprobs or [()] * len(ids)]
        return stack_rows(ids, values, length_and_filling(config)[1], prompts.input_ids.device)

    def _set_sampling(self, policy: nn.Module, config: GenerationConfig) -> None:
        """Set the sampling distribution in TRL's adapter, which reads it at each call."""
        for name, value in _distribution(config).items():
            setattr(self.vllm, name, value)
        # Only these tokens end a row, not the EOS that vLLM would add.
        self.vllm.max_completion_length, _ = length_and_filling(config)
        self.vllm.generation_kwargs |= {"ignore_eos": True, "stop_token_ids": stop_tokens(config)}
        self._suppress([token for token in config.suppress_tokens or [] if token < text_config(policy).vocab_size])

    def _suppress(self, ids: list[int]) -> None:
        """Suppress these ids, and no others, in the next calls."""
        self.vllm.generation_kwargs.pop("logit_bias", None)
        if len(ids) > MAX_BIASED_IDS:
            raise ValueError(
                f"generation_engine='vllm' can keep {MAX_BIASED_IDS} ids from being sampled, but {len(ids)} of the "
                "policy's ids are unknown to another model; set generation_engine to 'continuous' or 'transformers'"
            )
        if ids:
            self.vllm.generation_kwargs["logit_bias"] = dict.fromkeys(ids, -100.0)

    @property
    def _sleeps(self) -> bool:
        """Whether vLLM drops its weights after each call."""
        return self.vllm.mode == "colocate" and self.vllm.enable_sleep_mode

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Use the same random numbers on all ranks of a vLLM instance inside a context.

        Each rank samples all rows of the group with its own generators, whose states are restored afterwards.
        """
        if self.vllm.mode != "colocate" or self.vllm.tensor_parallel_size == 1:
            yield
            return
        seeds: list[Any] = [None] * self.vllm.tensor_parallel_size
        torch.distributed.all_gather_object(seeds, int(torch.randint(2**31, ())), group=self.vllm.tp_group)
        with isolated_rng(seeds[0]):
            yield

    def policy_changed(self) -> None:
        """Send the weights before the next response."""
        self._is_current = False


def _number(values: list[float | None]) -> float:
    """Return the log-probability of the sampled token; NaN if it is missing."""
    return float("nan") if not values or values[0] is None else values[0]


def _distribution(config: GenerationConfig) -> dict[str, float]:
    """Return the sampling arguments of TRL's adapter; temperature 0 is greedy."""
    if not config.do_sample:
        return {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": 0.0 if config.min_p is None else config.min_p,
    }


def start_vllm(
    args: PPOConfig,
    policy: nn.Module,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    rows: int,
) -> VLLMEngine:
    """Start a colocated vLLM, or connect to a server.

    Args:
        args: Gives the `vllm_*` arguments, and `response_length`.
        policy: The policy that is trained.
        accelerator: Gives the processes.
        tokenizer: The policy's tokenizer, or its processor in a run with images.
        rows: Number of rows to generate at once.

    Raises:
        ConnectionError: There is no such server, or it cannot be used; on all ranks.
        ValueError: The policy cannot be colocated, its adapter cannot be merged and sent, or the server's
            log-probabilities cannot be corrected for.
    """
    from trl.generation.vllm_generation import VLLMGeneration

    if (fault := _fault_of_adapter(policy)) is not None:
        raise ValueError(
            f"generation_engine='vllm' {fault}, or set generation_engine to 'continuous' or 'transformers'"
        )
    is_server = args.vllm_mode == "server"
    if not is_server and not getattr(policy, "name_or_path", ""):
        raise ValueError(
            "vllm_mode='colocate' loads the model from a directory or the hub, but the policy was made in memory; "
            "save it with save_pretrained, and load it from there"
        )
    address = _address(args) if is_server else ""
    with naming_server(address):
        vllm: Any = VLLMGeneration(
            model=cast(Any, policy),
            accelerator=accelerator,
            processing_class=tokenizer,
            max_num_seqs=rows * args.vllm_tensor_parallel_size,
            max_completion_length=args.response_length,
            logprobs=0,  # of the sampled token alone
            **{name: getattr(args, f"vllm_{name}") for name in OPTIONS},
        )
    if is_server:
        dtype, most = _model_of_server(args, vllm)
        limit = PositionLimit(
            most,
            f"the vLLM server at {redact_url(address)} runs with --max-model-len {most}",
            "restart the server with a larger --max-model-len",
        )
    else:
        model = vllm.llm.llm_engine.vllm_config.model_config
        dtype, limit = model.dtype, longest_colocated(args, model.max_model_len)
    _say_precision(args, policy, accelerator, str(dtype).removeprefix("torch."))
    return VLLMEngine(vllm, limit, address)


def _fault_of_adapter(policy: nn.Module) -> str | None:
    """Say why TRL cannot merge the policy's adapter and send each weight under the base's name; None: it can."""
    if unties_embeddings(policy):
        return (
            "has one matrix for the policy's embeddings and head, which the adapter changes separately: take lm_head "
            "and embed_tokens out of target_modules and modules_to_save"
        )
    if is_quantized(policy):
        return (
            "merges the adapter into its base at each update, which would round a quantized base anew: load the base "
            "in 16 bits"
        )
    if is_peft_model(policy) and not hasattr(cast(Any, policy).base_model, "merge_adapter"):
        return "cannot merge this kind of adapter: take LoRA"
    names = " ".join(name for name, _ in policy.named_parameters())
    if ".token_adapter." in names or re.search(r"\.modules_to_save\.(?!default\.)", names):
        return (
            "cannot be sent modules_to_save of an adapter that is not called 'default', nor trainable_token_indices: "
            "take them out of the adapter's configuration"
        )
    return None


def longest_colocated(args: PPOConfig, served: int | None = None) -> PositionLimit | None:
    """Return the longest prompt plus response that a colocated vLLM accepts, or None if unknown.

    Args:
        args: Gives `vllm_mode` and `vllm_max_model_length`.
        served: Longest sequence of the started vLLM's model, or None.
    """
    if args.vllm_mode != "colocate":
        return None
    if args.vllm_max_model_length is not None:
        reason = f"vllm_max_model_length={args.vllm_max_model_length}"
        return PositionLimit(args.vllm_max_model_length, reason, "raise vllm_max_model_length")
    if served is None:
        return None
    return PositionLimit(served, f"vLLM has room for {served}", "set vllm_max_model_length if the model has more")


def _address(args: PPOConfig) -> str:
    return args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"


def _model_of_server(args: PPOConfig, vllm: VLLMGeneration) -> tuple[str, int]:
    """Return the type and longest sequence of a server's model, on all ranks.

    Raises:
        ConnectionError: It does not answer.
        ValueError: Its log-probabilities cannot be corrected for.
    """
    accelerator = vllm.accelerator
    model_of_server: list[Any] = [None]
    with raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            model = vllm.vllm_client.get_server_info()["model_config"]
            mode = model["logprobs_mode"]
            if args.importance_sampling_correction and mode != "processed_logprobs":
                raise ValueError(
                    f"importance_sampling_correction=True, but the vLLM server runs with --logprobs-mode {mode}, "
                    "before temperature; restart it with --logprobs-mode processed_logprobs, or set "
                    "importance_sampling_correction=False"
                )
            model_of_server = [(model["dtype"], int(model["max_model_len"]))]
    return broadcast_object_list(model_of_server)[0]


def _say_precision(args: PPOConfig, policy: nn.Module, accelerator: Accelerator, sampled: str) -> None:
    """Warn if vLLM computes in a different precision from the policy."""
    corrected = (
        f"importance_sampling_correction={args.importance_sampling_correction}"
        f"{' corrects' if args.importance_sampling_correction else ' does not correct'} for the difference"
    )
    if args.lm_head_float32:
        logger.warning(
            "lm_head_float32=True is in the log-probabilities and in learning, but not in vLLM, which samples with a "
            f"head in {sampled}; {corrected}."
        )
    if (computed := str(multiplied_dtype(accelerator, policy)).removeprefix("torch.")) != sampled:
        logger.warning(f"vLLM samples in {sampled}, but the policy is trained in {computed}; {corrected}.")
