"""Sampling responses with vLLM, through TRL's adapter: colocated in the training processes, or a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhf_ppo.config.redaction import secrets_of, shown_address, shown_addresses, without
from rlhf_ppo.data.prompts import Prompts
from rlhf_ppo.generation.nonfinite import NonFiniteLogitsError
from rlhf_ppo.generation.protocol import Sampled, prompt_rows, stack_rows
from rlhf_ppo.models.adapters import base_kept
from rlhf_ppo.processes.logs import get_logger
from rlhf_ppo.processes.random_numbers import isolated_rng
from rlhf_ppo.processes.signals import may_be_given_up

if TYPE_CHECKING:
    from rlhf_ppo.config import PPOConfig

logger = get_logger(__name__)


class VLLMEngine:
    """vLLM with a copy of the policy's weights, sent to it before the first response after each change.

    Args:
        vllm: TRL's `VLLMGeneration`.
        can_be_left: Whether a signal may break off a call: of a server by one process. A colocated engine would keep
            what it had begun, and several processes wait for the one that asks the server.
    """

    reads_sharded = True

    def __init__(self, vllm: Any, can_be_left: bool = False) -> None:
        self.vllm, self.can_be_left = vllm, can_be_left
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
            NonFiniteLogitsError: The log-probability of a token is missing or NaN.
            Stopped: A signal has come, and the call can be left.
        """
        if not self._is_current or self._sleeps:
            with base_kept(policy):  # TRL's adapter merges, sends and unmerges
                self.vllm.sync_weights()
            self._is_current = True
        for name, value in _distribution(config).items():
            setattr(self.vllm, name, value)
        if config.suppress_tokens:  # the last ones of the vocabulary
            self.vllm.generation_kwargs["allowed_token_ids"] = list(range(min(config.suppress_tokens)))
        with self._same_random_numbers(), may_be_given_up() if self.can_be_left else nullcontext():
            _, ids, logprobs, _ = self.vllm.generate(prompt_rows(prompts), images=None, num_generations=1)
        of_sampled = [[token[0] for token in row] for row in logprobs or [()] * len(ids)]
        for row, (tokens, values) in enumerate(zip(ids, of_sampled, strict=True)):
            if len(tokens) != len(values) or any(value is None or not math.isfinite(value) for value in values):
                raise NonFiniteLogitsError(
                    f"generation_engine='vllm' gave no finite log-probability for each token of row {row}; look for "
                    "NaN in the policy's weights, and at the server's --logprobs-mode"
                )
        return stack_rows(ids, of_sampled, config.pad_token_id, prompts.input_ids.device)

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
        ValueError: The policy cannot be colocated, or the server's log-probabilities cannot be corrected for.
    """
    from trl.generation.vllm_generation import VLLMGeneration

    if args.vllm_mode == "colocate" and not getattr(policy, "name_or_path", ""):
        raise ValueError(
            "vllm_mode='colocate' loads the model from a directory or the hub, but the policy was made in memory; "
            "save_pretrained it and load it from there"
        )
    if args.lm_head_float32:
        logger.warning(
            "lm_head_float32=True is in the log-probabilities and in learning, but not in vLLM, which samples with a "
            "head in 16 bits; importance_sampling_correction=True corrects for the difference."
        )
    make: Any = _without_address(VLLMGeneration, args.vllm_server_base_url)
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
    if args.vllm_mode == "server" and args.importance_sampling_correction and accelerator.is_main_process:
        _check_logprobs_mode(vllm)
    return VLLMEngine(vllm, can_be_left=args.vllm_mode == "server" and accelerator.num_processes == 1)


def _without_address(make: Callable[..., Any], address: str | None) -> Callable[..., Any]:
    """Keep what stands before and behind the server's host and path out of the errors of connecting to it."""

    def made(**arguments: Any) -> Any:
        try:
            return make(**arguments)
        except (OSError, ValueError) as error:
            text = shown_addresses(without(str(error), secrets_of(address or "")))
        raise ConnectionError(f"the vLLM server at {shown_address(address or '')} cannot be used: {text}")

    return make if address is None else made


def _check_logprobs_mode(vllm: Any) -> None:
    mode = vllm.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise ValueError(
            f"importance_sampling_correction=True, but the vLLM server runs with --logprobs-mode {mode}, before "
            "temperature; restart it with --logprobs-mode processed_logprobs, or set "
            "importance_sampling_correction=False"
        )
