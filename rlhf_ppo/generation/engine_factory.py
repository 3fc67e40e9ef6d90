"""The generation engine that the arguments name, and the baseline completions that reward functions compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from accelerate import Accelerator
from accelerate.utils import compare_versions
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.prompts import silent_ids, spoken_texts
from rlhf_ppo.data.rollout import Prompts, Responses, selected
from rlhf_ppo.generation.continuous import ContinuousEngine
from rlhf_ppo.generation.protocol import GenerationEngine
from rlhf_ppo.generation.sampling import SpecialTokens, StopStrings
from rlhf_ppo.generation.transformers_engine import TransformersEngine
from rlhf_ppo.generation.vllm import start_vllm
from rlhf_ppo.models.unwrapping import is_sharded
from rlhf_ppo.ranks.processes import is_fsdp, mixed_precision_dtype, zero_stage
from rlhf_ppo.ranks.random_streams import isolated_rng, upcoming_seed
from rlhf_ppo.rewards.judges import OPPONENT_COLUMNS, opponent_of

ENGINE_NEEDS: dict[str, tuple[str, str]] = {
    "continuous": ("transformers", "5.11"),  # the first with a limit on the rows that run at a time
    "vllm": ("trl", "1.16"),  # the tested version; 1.11 and older have no `get_server_info`
}
"""Library of an engine and its lowest version, where that is above the package's own."""


@dataclass(frozen=True)
class BaselineCompletions:
    """Baseline responses to the same prompts, for reward functions that compare with them.

    A baseline is the reference, or a second sample of the policy, as in self-play (Wu et al., arXiv 2405.00675).

    Attributes:
        kinds: Keys of `OPPONENT_COLUMNS`, each once.
        tokenizer: The policy's tokenizer.
        tokens: The tokens that end a response.
    """

    kinds: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase
    tokens: SpecialTokens

    @classmethod
    def of(
        cls, functions: Iterable[Callable[..., object]], tokenizer: PreTrainedTokenizerBase, tokens: SpecialTokens
    ) -> BaselineCompletions:
        """Collect the baselines that reward functions ask for."""
        asked = [opponent_of(function) for function in functions]
        return cls(tuple(kind for kind in OPPONENT_COLUMNS if kind in asked), tokenizer, tokens)

    def respond(self, prompts: Prompts, generate: Callable[[str], Responses]) -> Prompts:
        """Sample a response of each baseline, with separate random numbers.

        The seed is derived from the state of the generators: it changes at each call, is the same after resuming, and
        is not part of a checkpoint.

        Args:
            prompts: `B` prompts.
            generate: Samples a response to each prompt from a baseline of a kind.

        Returns:
            The prompts with four more columns for each baseline: `<name>`, the texts of its `B` responses without
            their `silent_ids`; `<name>_ids`, their token ids; `<name>_written`, whether the baseline wrote each token;
            `<name>_ended`, whether they ended by themselves.
        """
        columns = dict(prompts.columns)
        for kind in self.kinds:
            with isolated_rng(upcoming_seed(kind)):
                answers = generate(kind)
            response_ids = selected(answers.response_ids, answers.episode_mask)
            name = OPPONENT_COLUMNS[kind]
            silent = silent_ids(self.tokenizer, self.tokens.stops)
            columns[name] = spoken_texts(self.tokenizer, response_ids, silent)
            columns[f"{name}_ids"], columns[f"{name}_ended"] = response_ids, self.tokens.ended(answers).tolist()
            columns[f"{name}_written"] = selected(answers.response_mask, answers.episode_mask)
        return dataclasses.replace(prompts, columns=columns)


def make_engine(
    args: PPOConfig,
    policy: nn.Module,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    stop_strings: StopStrings | None,
    baseline_kinds: Sequence[str] = (),
    local_batch_size: int | None = None,
) -> GenerationEngine:
    """Make the engine that `args.generation_engine` names.

    Args:
        args: The arguments.
        policy: The policy that is trained.
        accelerator: Gives the processes and the sharding.
        tokenizer: The policy's tokenizer, or its processor in a run with images.
        stop_strings: Texts that also end a row, or None. Only transformers' `generate` stops at them; responses of
            other engines are truncated afterwards: the same responses, for more work.
        baseline_kinds: Kinds of baselines that reward functions compare with.
        local_batch_size: Rows of an update on this process; vLLM generates all of them at once.

    Raises:
        ValueError: The engine's library is too old, or it cannot run under this sharding or sample a baseline.
    """
    engine = args.generation_engine
    if not is_recent_enough(engine):
        name, lowest = ENGINE_NEEDS[engine]
        raise ValueError(
            f"generation_engine={engine!r} needs {name} {lowest} or newer, but {version(name)} is installed; "
            f"`pip install -U {name}`, or set generation_engine='transformers'"
        )
    rows = args.local_rollout_forward_batch_size
    if engine == "vllm":
        if others := [kind for kind in baseline_kinds if kind != "self"]:
            raise ValueError(
                f"generation_engine='vllm' has the policy's weights only, but reward_funcs compare with {others}; "
                "set generation_engine to 'continuous' or 'transformers'"
            )
        return start_vllm(args, policy, accelerator, tokenizer, local_batch_size or rows)
    if engine == "transformers":
        return TransformersEngine(rows, stop_strings, accelerator.gather)  # pyright: ignore[reportArgumentType]
    if is_fsdp(accelerator) or (zero_stage(accelerator) == 3 and not args.ds3_gather_for_generation):
        raise ValueError(
            "generation_engine='continuous' needs whole layers, which FSDP and ZeRO-3 without "
            "ds3_gather_for_generation spread over the processes; set generation_engine='transformers' or 'vllm'"
        )
    continuous = ContinuousEngine(rows, mixed_precision_dtype(accelerator))
    if not is_sharded(policy):
        continuous.check(policy)
    return continuous


def is_recent_enough(engine: str) -> bool:
    """Return whether the installed library of an engine has the version of `ENGINE_NEEDS`."""
    name, lowest = ENGINE_NEEDS.get(engine, ("transformers", "0"))
    return compare_versions(name, ">=", lowest)
