"""The run of a critic audit: sampled responses, continuations of their prefixes, and the returns of both."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_ppo.data.images import IMAGES_COLUMN
from rlhf_ppo.data.rollout import Prompts, Responses, Rollout
from rlhf_ppo.generation.sampling import Sampler, join_responses
from rlhf_ppo.reporting.critic_audit import AuditedPrefixes, CriticAudit, audit
from rlhf_ppo.run.learning import monte_carlo_returns
from rlhf_ppo.run.run_state import RunState
from rlhf_ppo.run.steps import Steps

Array = NDArray[Any]


class CriticAuditor:
    """Samples the prefixes of a critic audit, and scores their continuations as training does.

    Args:
        trainer: Its steps sample, score and evaluate.
        respond: Samples a response to each prompt; returns them with the prompts that they follow.
        run: The run.
        sampler: Gives the sampling settings and the longest sequence.
        num_prefixes: `K`, prefixes of each response.
        num_continuations: `M`, continuations of each prefix.
    """

    def __init__(
        self,
        trainer: Steps,
        respond: Callable[[Prompts], tuple[Responses, Prompts]],
        run: RunState,
        sampler: Sampler,
        num_prefixes: int,
        num_continuations: int,
    ) -> None:
        self.trainer, self.respond, self.run, self.sampler = trainer, respond, run, sampler
        self.num_prefixes, self.num_continuations = num_prefixes, num_continuations
        self._generator = np.random.default_rng((run.args.seed, run.args.process_index))

    def audit(self, batches: Iterable[Prompts]) -> CriticAudit:
        """Audit the value model over the held-out prompts of all ranks; `batches` are this rank's.

        Rank 0 writes the result into the run's directory.
        """
        run = self.run
        gather = partial(run.accelerator.gather_for_metrics, use_gather_object=True)
        rows: list[AuditedRow] = [row for prompts in batches for row in gather(self._rows(prompts))]
        run.timer.drain()
        run.logged.drain()
        result = audit(prefixes_of(rows), run.args.seed)
        if run.args.process_index == 0:
            result.save(str(run.args.output_dir))
        return result

    def _rows(self, prompts: Prompts) -> list[AuditedRow]:
        """Sample responses to `B` prompts, and continuations of their prefixes."""
        responses, prompts = self.respond(prompts)
        rollout, _ = self._evaluate(responses, prompts)
        cuts = draw_cuts(responses.masks.response.sum(axis=1), self.num_prefixes, self._generator)
        of_prompt_alone = np.zeros_like(cuts[:, :1])
        returns = self._returns(rollout, prompts, np.concatenate((of_prompt_alone, cuts), axis=1))
        return audited_rows(rollout, cuts, returns)

    def _returns(self, rollout: Rollout, prompts: Prompts, cuts: Array) -> Array:
        """Sample `M` continuations of each prefix; return their Monte Carlo returns from the cut on, `(B, K, M)`.

        Args:
            rollout: `B` responses.
            prompts: Their prompts.
            cuts: Tokens that each prefix keeps, int `(B, K)`.
        """
        run, args = self.run, self.run.args
        width, longest = rollout.responses.context_length + args.response_length, self.sampler.longest_sequence
        slack = math.inf if longest is None else longest.tokens - width
        batches = batches_of(cuts, self.num_continuations, args.eval_batch_size, slack)
        of_ranks = run.gather(torch.tensor([len(batches)], device=args.device))
        num_batches = int(of_ranks.max())  # the same on every rank
        returns = np.full((*cuts.shape, self.num_continuations), np.nan)
        for index in range(num_batches):
            batch = batches[min(index, len(batches) - 1)]
            of_tokens = self._returns_of_tokens(rollout, prompts, batch).cpu().numpy()
            for (row, prefix, copy, cut), values in zip(batch, of_tokens, strict=True):
                returns[row, prefix, copy] = values[cut]
        return returns

    def _returns_of_tokens(self, rollout: Rollout, prompts: Prompts, batch: Sequence[Continuation]) -> Tensor:
        """Sample a batch of continuations; return the Monte Carlo return of each token of the responses, `(b, T)`."""
        args, tokens, config = self.run.args, self.run.tokens, self.sampler.settings()
        config.max_new_tokens = args.response_length - batch[0].cut
        sampled = self.trainer.generate_responses(prefix_prompts(rollout.responses, batch), config).response_ids
        ids = joined(rollout.responses, batch, sampled, args.response_length, tokens.pad)
        of_rows = prompts.take([continuation.row for continuation in batch])
        joined_responses = join_responses(of_rows, ids, tokens.stops, tokens.pad, tokens.stop_strings)
        return self._evaluate(joined_responses, of_rows)[1]

    def _evaluate(self, responses: Responses, prompts: Prompts) -> tuple[Rollout, Tensor]:
        """Score responses; return their rollout and Monte Carlo returns, `(B, T)`."""
        rollout = self.trainer.collect_rollout(prompts, responses)
        return rollout, monte_carlo_returns(rollout, self.trainer.shape_rewards(rollout), self.run.args)


class Continuation(NamedTuple):
    """A continuation to sample.

    Attributes:
        row: Row of the response.
        prefix: Number of the prefix among those of the response.
        copy: Number of the continuation among those of the prefix.
        cut: Number of response tokens that the prefix keeps.
    """

    row: int
    prefix: int
    copy: int
    cut: int


def draw_cuts(lengths: Array, num_cuts: int, generator: np.random.Generator) -> Array:
    """Draw the numbers of tokens that prefixes keep, one in each of `num_cuts` equal parts of a response.

    Args:
        lengths: Tokens of each response, int `(B,)`.
        num_cuts: Prefixes of each response.
        generator: Draws the cut within each part.

    Returns:
        From 0 (the prompt alone) to length - 1, int `(B, num_cuts)`.
    """
    shares = (np.arange(num_cuts) + generator.random((len(lengths), num_cuts))) / num_cuts
    return np.floor(shares * np.asarray(lengths)[:, None]).astype(int)


def batches_of(cuts: Array, num_continuations: int, max_rows: int, slack: float) -> list[list[Continuation]]:
    """Batch all continuations, prefixes of about equal length together.

    Args:
        cuts: Tokens that each prefix keeps, int `(B, K)`.
        num_continuations: Continuations of each prefix.
        max_rows: Maximum rows of a batch.
        slack: Largest difference of `cut` in a batch: the longest prefix must fit with the longest continuation.
    """
    continuations = [
        Continuation(row, prefix, copy, int(cut))
        for (row, prefix), cut in np.ndenumerate(cuts)
        for copy in range(num_continuations)
    ]
    batches: list[list[Continuation]] = []
    for continuation in sorted(continuations, key=operator.attrgetter("cut")):
        if not batches or len(batches[-1]) == max_rows or continuation.cut - batches[-1][0].cut > slack:
            batches.append([])
        batches[-1].append(continuation)
    return batches


def prefix_prompts(responses: Responses, batch: Sequence[Continuation]) -> Prompts:
    """Return prompt and prefix as prompts to continue, padded on the left."""
    ids, real = responses.query_responses.cpu(), responses.attention_mask.cpu()
    rows: list[list[int]] = []
    for row, _, _, cut in batch:
        kept = slice(responses.context_length + cut)
        rows.append(ids[row, kept][real[row, kept]].tolist())
    images = responses.images
    columns = {} if images is None else {IMAGES_COLUMN: [images[continuation.row] for continuation in batch]}
    return Prompts.of_rows(rows, 0, responses.query_responses.device, columns)


def joined(
    responses: Responses, batch: Sequence[Continuation], sampled: Tensor, width: int, padding_value: int
) -> Tensor:
    """Put prefixes and sampled continuations together, long `(b, width)`.

    Args:
        responses: The responses to which the prefixes belong.
        batch: `b` continuations.
        sampled: Their ids, long `(b, T)`.
        width: Longest response; a continuation is cut there.
        padding_value: Fills the columns behind a continuation.
    """
    whole = torch.full((len(batch), width), padding_value, dtype=torch.long, device=sampled.device)
    for index, (row, _, _, cut) in enumerate(batch):
        behind = sampled[index, : width - cut]
        whole[index, :cut] = responses.response_ids[row, :cut]
        whole[index, cut : cut + len(behind)] = behind
    return whole


class AuditedRow(NamedTuple):
    """A response with its prefixes, as ranks send it.

    Attributes:
        prompt: Token ids of its prompt.
        values: Value of each prefix, `(K,)`.
        prompt_mean: Mean return of continuations of the prompt alone.
        returns: Monte Carlo returns of each prefix's continuations, `(K, M)`.
    """

    prompt: tuple[int, ...]
    values: Array
    prompt_mean: float
    returns: Array


def audited_rows(rollout: Rollout, cuts: Array, returns: Array) -> list[AuditedRow]:
    """Return a row for each response.

    Args:
        rollout: The responses, with values `(B, T)`.
        cuts: Tokens that each prefix keeps, int `(B, K)`.
        returns: Monte Carlo returns of the prompt alone, then of each prefix, `(B, 1 + K, M)`.
    """
    prompts = Prompts.of_responses(rollout.responses)
    ids = [tuple(row[mask].tolist()) for row, mask in zip(prompts.input_ids.cpu(), prompts.mask, strict=True)]
    values = np.take_along_axis(rollout.values.double().cpu().numpy(), cuts, axis=1)
    return list(map(AuditedRow, ids, values, returns[:, 0].mean(axis=1), returns[:, 1:]))


def prefixes_of(rows: Sequence[AuditedRow]) -> AuditedPrefixes:
    """Make prefixes from the rows of all ranks; those with an unscored continuation are left out."""
    ids, values, means, returns = zip(*rows, strict=True)
    prompts = [ids.index(prompt) for prompt in ids]
    prompts, means = (np.repeat(column, len(values[0])) for column in (prompts, means))
    prefixes = AuditedPrefixes(prompts, np.concatenate(values), means, np.concatenate(returns))
    scored = np.isfinite(prefixes.prompt_means) & np.isfinite(prefixes.means)
    return prefixes.take(scored, prompts[scored])
