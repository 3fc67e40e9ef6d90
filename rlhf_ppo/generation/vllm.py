"""Sampling responses with vLLM, through TRL's adapter: colocated in the training processes, or a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhf_ppo.config.redaction import shown_address
from rlhf_ppo.data.lengths import PositionLimit
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.generation.protocol import Sampled, prompt_rows, stack_rows
from rlhf_ppo.generation.vllm_server import served_generation
from rlhf_ppo.models.adapters import base_kept
from rlhf_ppo.models.vocabulary import vocab_size
from rlhf_ppo.processes.engines import product_dtype
from rlhf_ppo.processes.failing import failing_together
from rlhf_ppo.processes.logs import get_logger
from rlhf_ppo.processes.random_numbers import isolated_rng
from rlhf_ppo.processes.signals import may_be_given_up

if TYPE_CHECKING:
    from rlhf_ppo.config import PPOConfig

logger = get_logger(__name__)

MAX_BIASED_IDS = 1024
"""Ids that a request may keep from being sampled: `MAX_NUM_LOGIT_BIAS_TOKENS` of vLLM's runner for GPUs."""


class VLLMEngine:
    """vLLM with a copy of the policy's weights, sent to it before the first response after each change.

    Args:
        vllm: TRL's `VLLMGeneration`.
        can_be_left: Whether a signal may break off a call: of a server by one process. A colocated engine would keep
            what it had begun, and several processes wait for the one that asks the server.
        longest_sequence: Longest prompt with its response that this vLLM can place, or None if that is not known.
    """

    reads_sharded = True
    called = "generation_engine='vllm'"
    cut_rows_advice = (
        "raise vllm_max_model_length, or the server's --max-model-len, to the sum of both, or lower response_length"
    )

    def __init__(self, vllm: Any, can_be_left: bool = False, longest_sequence: PositionLimit | None = None) -> None:
        self.vllm, self.can_be_left, self.longest_sequence = vllm, can_be_left, longest_sequence
        self._is_current = False

    def sample(self, policy: nn.Module, prompts: Prompts, config: GenerationConfig) -> Sampled:
        """Generate a response to each prompt; every rank makes the same calls.

        Args:
            policy: The policy that the engine was made for; its weights are read by TRL's adapter.
            prompts: `B` left-padded prompts; ids under the mask are ignored.
            config: The sampling distribution; the stop token and the length limit were set when vLLM started.

        Returns:
            The responses and their log-probabilities.

        Raises:
            ConnectionError: The server has died or hangs; on all ranks.
            Stopped: A signal has come, and the call can be left.
        """
        if not self._is_current or self._sleeps:
            with self._failing_together(), base_kept(policy):  # TRL's adapter merges, sends and unmerges
                self.vllm.sync_weights()
            self._is_current = True
        for name, value in _distribution(config).items():
            setattr(self.vllm, name, value)
        self._suppress([token for token in config.suppress_tokens or [] if token < vocab_size(policy)])
        with self._failing_together(), self._same_random_numbers():
            with may_be_given_up() if self.can_be_left else nullcontext():
                _, ids, logprobs, _ = self.vllm.generate(prompt_rows(prompts), images=None, num_generations=1)
        values = [[_number(token) for token in row] for row in logprobs or [()] * len(ids)]
        return stack_rows(ids, values, config.pad_token_id, prompts.input_ids.device)

    def _suppress(self, ids: list[int]) -> None:
        """Keep ids from being sampled in the next calls, and no others."""
        self.vllm.generation_kwargs.pop("logit_bias", None)
        if len(ids) > MAX_BIASED_IDS:
            raise ValueError(
                f"generation_engine='vllm' can keep {MAX_BIASED_IDS} ids from being sampled, but {len(ids)} of the "
                "policy's ids are unknown to another model; set generation_engine to 'continuous' or 'transformers'"
            )
        if ids:
            self.vllm.generation_kwargs["logit_bias"] = dict.fromkeys(ids, -100.0)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Raise an error of the server, which only the main process asks, on all ranks."""
        if self.vllm.mode != "server":
            yield
            return
        accelerator = self.vllm.accelerator
        with failing_together(accelerator):
            yield
            if accelerator.is_main_process:
                self.vllm.vllm_client.raise_failure()

    @property
    def _sleeps(self) -> bool:
        """Whether its weights are gone after each call; TRL's `generate` would send them by itself."""
        return self.vllm.mode == "colocate" and self.vllm.enable_sleep_mode

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Let the ranks that are one vLLM together draw the same numbers in the block, and their own ones after it.

        Each of them samples every row of the group, from the process's generators, and goes on with what it sampled.
        """
        if self.vllm.mode != "colocate" or self.vllm.tensor_parallel_size == 1:
            yield
            return
        seeds: list[Any] = [None] * self.vllm.tensor_parallel_size
        torch.distributed.all_gather_object(seeds, int(torch.randint(2**31, ())), group=self.vllm.tp_group)
        with isolated_rng(seeds[0], device_specific=False):
            yield

    def policy_changed(self) -> None:
        """Have the weights sent before the next response."""
        self._is_current = False


def _number(values: Any) -> float:
    """Return the log-probability of the sampled token, the only one that is asked for; NaN where it is missing."""
    return float("nan") if not values or values[0] is None else values[0]


def _distribution(config: GenerationConfig) -> dict[str, float]:
    """Return what TRL's adapter reads at each call; temperature 0 is greedy."""
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
    tokenizer: PreTrainedTokenizerBase,
    stop_token_id: int | None,
    rows: int,
) -> VLLMEngine:
    """Start a colocated vLLM, or connect to a server.

    Args:
        args: Gives the `vllm_*` arguments, and `response_length`.
        policy: The policy that is trained.
        accelerator: Knows the processes.
        tokenizer: The policy's tokenizer.
        stop_token_id: Where a row ends, or None.
        rows: How many rows are generated from at once.

    Raises:
        ConnectionError: There is no such server, or it cannot be used; on all ranks.
        ValueError: The policy cannot be colocated, or the server's log-probabilities cannot be corrected for.
    """
    from trl.generation.vllm_generation import VLLMGeneration

    is_server = args.vllm_mode == "server"
    if not is_server and not getattr(policy, "name_or_path", ""):
        raise ValueError(
            "vllm_mode='colocate' loads the model from a directory or the hub, but the policy was made in memory; "
            "save_pretrained it and load it from there"
        )
    make: Any = served_generation(args) if is_server else VLLMGeneration
    vllm: Any = make(
        model=policy,
        accelerator=accelerator,
        processing_class=tokenizer,
        mode=args.vllm_mode,
        server_base_url=args.vllm_server_base_url,
        server_host=args.vllm_server_host,
        server_port=args.vllm_server_port,
        server_timeout=args.vllm_server_timeout,
        group_port=args.vllm_group_port,
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        max_model_length=args.vllm_max_model_length,
        max_num_seqs=rows * args.vllm_tensor_parallel_size,
        enable_sleep_mode=args.vllm_enable_sleep_mode,
        model_impl=args.vllm_model_impl,
        max_completion_length=args.response_length,
        logprobs=0,  # of the sampled token alone
        # Only the stop token ends a row, which may be another one than EOS or none.
        generation_kwargs={"ignore_eos": True, "stop_token_ids": [] if stop_token_id is None else [stop_token_id]},
    )
    served = _model_of_server(args, vllm) if is_server else _model_of_colocated(vllm)
    _say_precision(args, policy, accelerator, str(served["dtype"]).removeprefix("torch."))
    limit = _limit_of_server(args, served["max_model_len"]) if is_server else longest_colocated(args, served)
    return VLLMEngine(vllm, is_server and accelerator.num_processes == 1, limit)


def longest_colocated(args: PPOConfig, served: dict[str, Any] | None = None) -> PositionLimit | None:
    """Return the longest prompt with its response in a colocated vLLM, or None where nothing is known of it.

    Args:
        args: Gives `vllm_max_model_length`.
        served: What vLLM runs with, once it has started.
    """
    if args.generation_engine != "vllm" or args.vllm_mode != "colocate":
        return None
    if args.vllm_max_model_length is not None:
        reason = f"vllm_max_model_length={args.vllm_max_model_length}"
        return PositionLimit(args.vllm_max_model_length, reason, "raise vllm_max_model_length")
    if served is None:
        return None
    most = served["max_model_len"]
    return PositionLimit(most, f"vLLM has room for {most}", "set vllm_max_model_length if the model has more")


def _limit_of_server(args: PPOConfig, most: int) -> PositionLimit:
    address = shown_address(args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}")
    reason = f"the vLLM server at {address} runs with --max-model-len {most}"
    return PositionLimit(most, reason, "restart the server with a larger --max-model-len")


def _model_of_colocated(vllm: Any) -> dict[str, Any]:
    """Return what a colocated vLLM says of its model."""
    model = vllm.llm.llm_engine.vllm_config.model_config
    return {"dtype": model.dtype, "max_model_len": model.max_model_len}


def _model_of_server(args: PPOConfig, vllm: Any) -> dict[str, Any]:
    """Return what a server says of its model, on all ranks.

    Raises:
        ConnectionError: It cannot be asked.
        ValueError: Its log-probabilities cannot be corrected for.
    """
    accelerator = vllm.accelerator
    said: list[Any] = [None]
    with failing_together(accelerator):
        if accelerator.is_main_process:
            model = vllm.vllm_client.server_info()
            if args.importance_sampling_correction:
                _check_logprobs_mode(model["logprobs_mode"])
            said = [{"dtype": model["dtype"], "max_model_len": int(model["max_model_len"])}]
    return broadcast_object_list(said)[0]


def _say_precision(args: PPOConfig, policy: nn.Module, accelerator: Accelerator, sampled: str) -> None:
    """Warn in one line where vLLM computes in other precision than the policy."""
    corrected = (
        f"importance_sampling_correction={args.importance_sampling_correction}"
        f"{' corrects' if args.importance_sampling_correction else ' does not correct'} for the difference"
    )
    if args.lm_head_float32:
        logger.warning(
            "lm_head_float32=True is in the log-probabilities and in learning, but not in vLLM, which samples with a "
            f"head in {sampled}; {corrected}."
        )
    own = product_dtype(accelerator) or next(each.dtype for each in policy.parameters() if each.is_floating_point())
    if (computed := str(own).removeprefix("torch.")) != sampled:
        logger.warning(f"vLLM samples in {sampled}, but the policy is trained in {computed}; {corrected}.")


def _check_logprobs_mode(mode: str) -> None:
    if mode != "processed_logprobs":
        raise ValueError(
            f"importance_sampling_correction=True, but the vLLM server runs with --logprobs-mode {mode}, before "
            "temperature; restart it with --logprobs-mode processed_logprobs, or set "
            "importance_sampling_correction=False"
        )
