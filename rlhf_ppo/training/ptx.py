"""PPO-ptx: language modelling beside PPO, so that the policy keeps what it was trained on before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.sizes import Sizes
from rlhf_ppo.data.experience import micro_batches
from rlhf_ppo.data.lengths import PositionLimit
from rlhf_ppo.data.rollout import Responses
from rlhf_ppo.data.texts import Text, prepare_texts
from rlhf_ppo.models.policy_and_value import PolicyAndValue
from rlhf_ppo.models.vocabulary import Vocabulary
from rlhf_ppo.processes.random_numbers import seed_of
from rlhf_ppo.reporting.update_statistics import UpdateStatistics
from rlhf_ppo.training.checks import check_ptx
from rlhf_ppo.training.critic import CriticLearning
from rlhf_ppo.training.own_loop import padded_responses
from rlhf_ppo.training.special_tokens import SpecialTokens
from rlhf_ppo.training.stateful import StatefulParts
from rlhf_ppo.training.stepping import OptimizerSteps


class PtxTrainer(Protocol):
    """What language modelling asks of its trainer."""

    accelerator: Accelerator
    args: PPOConfig
    sizes: Sizes
    tokens: SpecialTokens
    _critic: CriticLearning
    _gather: Callable[[Tensor], Tensor]
    _longest_sequence: PositionLimit | None
    _stateful: StatefulParts
    _steps: OptimizerSteps
    _sum: Callable[[Tensor], Tensor]
    _tokenizer: PreTrainedTokenizerBase
    _vocabulary: Vocabulary

    def _unwrapped(self, model: nn.Module) -> PolicyAndValue: ...


class LanguageModeling:
    """Adds `ptx_coef` times the mean negative log-likelihood of texts to each optimizer step.

        L = L_PPO - ptx_coef mean_t log pi(x_t | x_<t),    at temperature 1

    over as many rows of `ptx_dataset` as the mini-batch has episodes, in micro-batches of the same size, with backward
    passes of their own before PPO's. The mean is over the learned tokens of all ranks. Each pass over the rows has an
    order of its own, drawn from the seed alone. Ouyang et al., *Training language models to follow instructions with
    human feedback* (arXiv 2203.02155), section 3.5.

    Args:
        run: The trainer.
        dataset: `ptx_dataset`, or None without `ptx_coef`.
    """

    def __init__(self, run: PtxTrainer, dataset: Any) -> None:
        self.run, self.texts, self.num_drawn = run, list[Text](), 0
        self._orders: dict[int, Sequence[int]] = {}
        check_ptx(run.args, dataset)
        if dataset is not None:
            limit = run._longest_sequence
            sizes = (None if limit is None else limit.tokens, run._vocabulary.size or len(run._tokenizer))
            self.texts = prepare_texts(dataset, run._tokenizer, *sizes, name="ptx_dataset")
            run._stateful.register("ptx", self)

    def state_dict(self) -> Mapping[str, Any]:
        """Return how many rows were drawn, on all ranks."""
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.num_drawn = int(state["num_drawn"])

    def learn(self, model: nn.Module, statistics: UpdateStatistics) -> Tensor | float:
        """Add the gradients of the next rows to those of the optimizer step.

        Args:
            model: The prepared model.
            statistics: Takes the sum of the negative log-likelihoods, and the tokens.

        Returns:
            The loss as the step sums it up, which is 0 without `ptx_coef`, and while the value model learns alone.
        """
        if not self.texts or self.run._critic.is_alone:
            return 0.0
        run, coef = self.run, self.run.args.ptx_coef
        rows = self._rows()
        num_tokens = run._sum(rows.response_mask.sum())
        total = torch.zeros((), device=rows.response_mask.device)
        args, packs_rows = run.args, run._unwrapped(model).packs_rows
        cut = (args.per_device_train_batch_size, args.max_tokens_per_micro_batch, run._gather, packs_rows)
        # DeepSpeed keeps the last step's gradient of a parameter without a part in a step's first backward pass.
        only = None if run.accelerator.distributed_type == DistributedType.DEEPSPEED else "policy"
        for part in micro_batches(rows, *cut):
            with run._steps.accumulating(model, is_last=False):
                with run._steps.forward_context():
                    output = model(*part.batch, only=only, places=part.places, temperature=1.0)
                    nll = -output.logprobs.sum()  # 0 on what is only read
                    idle = 0.0 if only else 0.0 * output.values.sum()
                run._steps.backward(coef * nll / num_tokens + idle)
                total += nll.detach()
        statistics.ptx = torch.stack([total, rows.response_mask.sum().float()])
        return coef * total / num_tokens * run.accelerator.num_processes

    def count_step(self) -> None:
        """Count the rows of a step that is done; one that a signal gives up takes the same ones again."""
        if not self.run._critic.is_alone:
            self.num_drawn += self.run.sizes.mini_batch_size

    def _rows(self) -> Responses:
        """Return this rank's rows of the next step, the longest first."""
        run, number = self.run, self.run.sizes.local_mini_batch_size
        first = self.num_drawn + run.accelerator.process_index * number
        texts = [self._drawn(index) for index in range(first, first + number)]
        context, learned = ([torch.tensor(ids) for ids in parts] for parts in zip(*texts, strict=True))
        rows = padded_responses(context, learned, None, number, run.tokens.pad, run.args.device)
        return rows[rows.longest_first()]

    def _drawn(self, index: int) -> Text:
        number, place = divmod(index, len(self.texts))
        if number not in self._orders:
            args = self.run.args
            seed = seed_of("ptx", args.seed if args.data_seed is None else args.data_seed, number)
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(self.texts), generator=generator).tolist()
            self._orders = {last: self._orders[last] for last in self._orders if last == number - 1} | {number: order}
        return self.texts[self._orders[number][place]]
