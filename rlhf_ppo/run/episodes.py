"""Tools and environments of a trainer: their checks, their prompts, their rollouts and their metrics."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.conversation import EPISODE_COLUMN, Conversations, EpisodeEncoder, check_versions
from rlhf_ppo.data.prompts import PromptEncoder, written_texts
from rlhf_ppo.data.rollout import PositionLimit, Prompts, Responses, selected
from rlhf_ppo.environments.pool import Environments, EpisodeError
from rlhf_ppo.generation.episodes import (
    CUTS,
    EpisodeLimits,
    EpisodePlayer,
    EpisodeRecord,
    Ranks,
    responses_of_function,
)
from rlhf_ppo.generation.protocol import Continues, Sampled
from rlhf_ppo.generation.sampling import Sampler, changed, sample_with, stop_tokens
from rlhf_ppo.models.capabilities import Vocabulary, check_rows
from rlhf_ppo.models.unwrapping import gathers_in_passes
from rlhf_ppo.ranks.processes import num_processes, raise_on_all_ranks
from rlhf_ppo.ranks.random_streams import derive_seed
from rlhf_ppo.rewards.functions import rewards_of
from rlhf_ppo.run.rollouts import Play
from rlhf_ppo.run.run_state import RunState


class EpisodeRollouts:
    """Rollouts of several turns, with tools and environments.

    Args:
        args: The arguments.
        tools: Functions that the policy may call, or None.
        environment_factory: Makes environments: a function, or a dict of functions by name, or None.
        rollout_func: Makes whole rollouts instead, or None.

    Attributes:
        rewards: Rewards of the environments.
        conversations: Renders prompts and answers; set by `prepare`.

    Raises:
        ValueError: The arguments exclude each other.
    """

    conversations: Conversations

    def __init__(
        self,
        args: PPOConfig,
        tools: Sequence[Callable[..., Any]] | None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
        rollout_func: Callable[..., Any] | None,
    ) -> None:
        self.args, self.rollout_func = args, rollout_func
        if rollout_func is None:
            check_versions()
        elif tools or environment_factory is not None:
            raise ValueError("rollout_func makes whole rollouts: leave out tools and environment_factory")
        self.environments = Environments(environment_factory, tools or (), args.tool_timeout)
        self.has_environments = environment_factory is not None
        self.rewards: list[Any] = rewards_of(self.environments.kinds.values())

    @classmethod
    def of(cls, args: PPOConfig, tools: Any, environment_factory: Any, rollout_func: Any) -> EpisodeRollouts | None:
        """Return the rollouts that the trainer's arguments ask for; None where they ask for none."""
        if not tools and environment_factory is None and rollout_func is None:
            return None
        return cls(args, tools, environment_factory, rollout_func)

    # ---- Construction ----

    def prepare(self, tokenizer: PreTrainedTokenizerBase, train_dataset: Any) -> Any:
        """Check that the tokenizer's template can show tools, and that something ends a turn.

        Returns:
            The training set.

        Raises:
            ValueError: The template shows no tools, nothing ends a turn, or no data set or environment gives tasks.
        """
        args, kinds = self.args, self.environments.kinds.values()
        has_tools = self.rollout_func is None and any(kind.tools for kind in kinds)
        self.conversations = Conversations(tokenizer, has_tools, args.template_kwargs)
        stops = (args.stop_token, args.stop_token_id, args.stop_strings)
        if self.rollout_func is None and not any(stop is not None for stop in stops):
            raise ValueError("Nothing ends a turn: set stop_token='eos', stop_token_id or stop_strings")
        if train_dataset is not None:
            return train_dataset
        if not self.has_environments or self.environments.is_mixed:
            raise ValueError("train_dataset=None: pass prompts, or a single environment_factory that makes tasks")
        if args.user_value("max_steps") is None and args.user_value("total_episodes") is None:
            raise ValueError("train_dataset=None has no length: set max_steps or total_episodes")
        num_rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * num_processes(args)
        return [{"prompt": self.conversations.default_prompt()}] * (num_rows // args.num_generations)

    @property
    def encoder(self) -> Callable[[str, Vocabulary, Sequence[int]], PromptEncoder] | None:
        """What makes the encoder of a data set's rows; None where `rollout_func` gets the prompts as they are."""
        return self._encoder if self.rollout_func is None else None

    def _encoder(self, name: str, vocabulary: Vocabulary, stops: Sequence[int]) -> PromptEncoder:
        kinds, conversations = self.environments.kinds, self.conversations.ended_by(stops)
        return EpisodeEncoder(
            conversations.tokenizer,
            name,
            vocabulary.size,
            vocabulary.limited_by,
            conversations=conversations,
            schemas={key: kind.schemas for key, kind in kinds.items()},
            is_mixed=self.environments.is_mixed,
            needs_chat=frozenset(key for key, kind in kinds.items() if kind.tools),
            of_texts=frozenset(key for key, kind in kinds.items() if kind.takes_messages),
            stops=stops,
            needs_prompts=not self.has_environments,
        )

    # ---- Rollouts ----

    def player(
        self,
        run: RunState,
        sampler: Sampler,
        longest_sequence: PositionLimit | None,
        vocabulary: Vocabulary,
        opponents: Sequence[str],
    ) -> Play:
        """Return the function that makes the rollouts.

        Args:
            run: The run; a `rollout_func` gets its trainer.
            sampler: Gives the engine that samples the turns, its settings, and the longest sequence of a turn.
            longest_sequence: The longest that every model supports, for a `rollout_func`; or None.
            vocabulary: Ids that all models embed.
            opponents: Kinds of the policies that reward functions compare with.

        Raises:
            ValueError: A reward function compares with another policy, which has no episodes.
        """
        if opponents:
            raise ValueError(f"reward_funcs compare with {list(opponents)}, which plays no episodes: leave them out")

        def play(model: nn.Module, prompts: Prompts, config: GenerationConfig | None) -> tuple[Responses, Prompts]:
            with sampler.policy_of(model) as policy:
                if self.rollout_func is not None:
                    return self._roll_out(self.rollout_func, run, longest_sequence, vocabulary, prompts)
                return self._play(run, sampler, policy, prompts, config or sampler.settings())

        return play

    def _play(
        self, run: RunState, sampler: Sampler, policy: nn.Module, prompts: Prompts, config: GenerationConfig
    ) -> tuple[Responses, Prompts]:
        """Play an episode for each prompt; return the responses, and the prompts that they follow."""
        stops = run.tokens.stops
        if self.args.stop_token == "eos" and any(kind.tools for kind in self.environments.kinds.values()):
            # Some models end a turn that calls a tool with a token other than EOS.
            own = getattr(policy, "generation_config", None)
            stops = stops if own is None else tuple(dict.fromkeys([*stops, *stop_tokens(own)]))

        engine = sampler.engine
        turns = engine.continuing() if isinstance(engine, Continues) else engine

        def sample(contexts: Prompts, most: int) -> Sampled:
            how = changed(config, max_new_tokens=most, eos_token_id=list(stops) or None)
            return sample_with(turns, policy, contexts, how, run.tokens.stop_strings)

        limits = EpisodeLimits(
            response_length=self.args.response_length,
            max_rounds=self.args.max_tool_calling_iterations,
            stops=stops,
            stop_strings=run.tokens.stop_strings,
            longest_sequence=sampler.longest_sequence,
            pad=run.tokens.pad,
        )
        ranks = Ranks(partial(_most_of_ranks, run), partial(raise_on_all_ranks, run.accelerator))
        ranks = ranks if self._needs_step(run, policy) else Ranks()
        draws_apart = run.streams.rewards.in_use  # tools and environments do not draw training's random numbers
        player = EpisodePlayer(sample, self.conversations.ended_by(stops), limits, ranks, draws_apart)
        columns = prompts.columns
        rows = [{name: values[row] for name, values in columns.items()} for row in range(len(prompts))]
        with raise_on_all_ranks(run.accelerator), draws_apart():  # the first pass of a sharded policy waits for all
            start = time.perf_counter()
            episodes = self.environments.start(rows, self._seeds(run, len(rows)))
            seconds = time.perf_counter() - start
            records = player.begin(prompts, episodes)
        with raise_on_all_ranks(run.accelerator, EpisodeError):  # other errors come from passes
            responses, played = player.play(prompts, records)
        self._log(run, played.columns[EPISODE_COLUMN], seconds + player.seconds)
        return responses, played

    def _needs_step(self, run: RunState, policy: nn.Module) -> bool:
        is_shared = self.args.generation_engine == "vllm" or gathers_in_passes(policy)
        return run.accelerator.num_processes > 1 and is_shared

    def _seeds(self, run: RunState, num_rows: int) -> list[int]:
        """Return each row's seed: the same for all responses to a prompt, and at each evaluation."""
        seed, rank = self.args.seed, self.args.process_index
        if run.streams.num_apart is not None:
            run.streams.num_apart += 1
            number = run.streams.num_apart
            return [derive_seed("evaluated environment", seed, rank, number, row) for row in range(num_rows)]
        copies, update = self.args.num_generations, run.state.global_step
        return [derive_seed("environment", seed, rank, update, row // copies) for row in range(num_rows)]

    def _log(self, run: RunState, records: Sequence[EpisodeRecord], seconds: float) -> None:
        """Log metrics of the episodes of all ranks."""
        names = sorted({name for kind in self.environments.kinds.values() for name in kind.tools})
        calls = [call for record in records if not record.episode.kind.takes_messages for call in record.calls]
        per_episode = {
            "episode/turns_mean": sum(len(record.turn_ends) for record in records),
            "environment/tokens_mean": sum(record.written.count(False) for record in records),
            **{f"episode/cut_by_{cut}_frac": sum(record.cut == cut for record in records) for cut in CUTS},
        }
        per_call: dict[str, float] = {}
        if names:
            per_episode["tools/call_frequency"] = len(calls)
            per_episode |= {f"tools/{name}/calls": sum(called == name for called, _, _ in calls) for name in names}
            per_call["tools/failure_frequency"] = sum(failed for _, failed, _ in calls)
            per_call["tools/latency_s"] = sum(took for _, _, took in calls)
        of_rank = [len(records), len(calls), *per_episode.values(), *per_call.values()]
        summed = run.sum_over_ranks(torch.tensor(of_rank, dtype=torch.float32, device=self.args.device)).tolist()
        num_episodes, num_calls, *totals = summed
        run.timer.move(seconds, "generate", "environment")
        for name, total in zip([*per_episode, *per_call], totals, strict=True):
            count = num_calls if name in per_call else num_episodes
            run.logged.log_metric(name, total / max(count, 1), count)
        run.logged.log_extra(EPISODE_COLUMN, [record.summary for record in records])

    def _roll_out(
        self,
        rollout_func: Callable[..., Any],
        run: RunState,
        longest_sequence: PositionLimit | None,
        vocabulary: Vocabulary,
        prompts: Prompts,
    ) -> tuple[Responses, Prompts]:
        """Let `rollout_func` make the responses to the prompts; check that the models can read them."""
        asked = prompts.columns.get("prompt")
        if asked is None:
            asked = written_texts(
                run.tokenizer, selected(prompts.input_ids, prompts.attention_mask), skip_special_tokens=True
            )
        returned = rollout_func(copy.deepcopy(list(asked)), run.trainer)
        responses, played = responses_of_function(returned, len(prompts), prompts, run.tokens.pad)
        read = {
            "prompt_ids": (played.input_ids, played.attention_mask),
            "completion_ids": (responses.response_ids, responses.episode_mask),
        }
        ids = {
            name: [torch.tensor(row, dtype=torch.long) for row in selected(*masked)] for name, masked in read.items()
        }
        check_rows(ids, vocabulary, longest_sequence)
        return responses, played


def _most_of_ranks(run: RunState, numbers: list[int]) -> list[int]:
    return run.gather(torch.tensor([numbers], device=run.args.device)).amax(dim=0).tolist()
