"""Metrics of an update: sums over the tokens of its micro-batches, averaged at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_ppo.algorithm.losses import PolicyLoss, ValueLoss, approx_kl
from rlhf_ppo.algorithm.penalties import kl_estimate
from rlhf_ppo.data.experience import Experience
from rlhf_ppo.models.policy_and_value import PolicyAndValueOutput


@dataclass
class UpdateStatistics:
    """Sums over the real tokens of an update's micro-batches; read once, at the end of the update.

    Attributes:
        sums: Per-token sums of each micro-batch, in the order of `KEYS` and `named`, and the number of tokens last.
        named: Names of the figures that the losses give beyond these.
        watches_kl: Whether `KL` is one of them.
        num_epochs: Epochs that were learned, where that is watched.
        grad_norms: Norms of the gradients of policy and value model at each optimizer step, float32 `(2,)`.
        learns_ptx: Whether texts are learned from besides, whose two sums then stand before the number of tokens.
        ptx: These of the step whose micro-batches come next, float32 `(2,)`: negative log-likelihood and tokens.
    """

    KL = "policy/kl_avg"
    NLL, POSITIVE = "loss/positive_nll_avg", "policy/positive_frac"
    VALUED, OF_VALUES = "val/valued_frac", ("loss/value_avg", "val/clipfrac_avg")
    NORMS = ("policy/grad_norm", "val/grad_norm")

    KEYS = (
        "policy/approxkl_avg",
        "policy/clipfrac_avg",
        "policy/entropy_avg",
        "loss/policy_avg",
        "loss/value_avg",
        "val/clipfrac_avg",
        "val/ratio",
    )

    sums: list[Tensor] = field(default_factory=list)
    named: tuple[str, ...] = ()
    watches_kl: bool = False
    num_epochs: int | None = None
    grad_norms: list[Tensor] = field(default_factory=list)
    learns_ptx: bool = False
    ptx: Tensor | None = None

    @torch.no_grad()
    def add(self, part: Experience, output: PolicyAndValueOutput, policy: PolicyLoss, value: ValueLoss) -> None:
        """Add one micro-batch.

        Args:
            part: The micro-batch.
            output: What the two models said.
            policy: The policy's per-token loss, `(B, T)` each field.
            value: The value model's per-token loss.

        Raises:
            ValueError: The losses give other figures than those of the micro-batch before, or one of another shape.
        """
        mask, figures = part.loss_mask, {**policy.figures, **value.figures}
        values_count = torch.ones_like(mask, dtype=torch.float32)
        if part.value_weights is not None:
            values_count = figures[self.VALUED] = (part.value_weights > 0).float()
        if self.watches_kl:
            figures[self.KL] = kl_estimate(part.logprobs, output.logprobs, "k3")
        if part.is_positive is not None:
            positive = part.is_positive[:, None].expand(mask.shape).float()
            figures |= {self.NLL: -output.logprobs * positive, self.POSITIVE: positive}
        self._check_figures(figures, mask.shape)
        per_token = (
            approx_kl(output.logprobs, part.logprobs),
            policy.clipped,
            output.entropy,
            policy.loss,
            value.loss * values_count,
            value.clipped * values_count,
            policy.ratio,
            *figures.values(),
        )
        sums = [values.float().masked_fill(~mask, 0.0).sum() for values in per_token]
        if self.learns_ptx:
            sums += [*(torch.zeros_like(sums[0]).expand(2) if self.ptx is None else self.ptx)]
            self.ptx = None
        self.sums.append(torch.stack([*sums, mask.sum().float()]))

    def _check_figures(self, figures: Mapping[str, Tensor], shape: torch.Size) -> None:
        if taken := sorted(set(figures) & set(self.KEYS)):
            raise ValueError(f"a loss gives figures called {taken}, which other metrics are called; rename them")
        if self.sums and tuple(figures) != self.named:
            raise ValueError(
                f"the losses give the figures {list(figures)} and gave {list(self.named)} before; give the same ones "
                "for every micro-batch"
            )
        for name, values in figures.items():
            if values.shape != shape:
                raise ValueError(f"the figure {name!r} has shape {tuple(values.shape)}, expected {tuple(shape)}")
        self.named = tuple(figures)

    def mean_kl(self, start: int, reduce_sum: Callable[[Tensor], Tensor]) -> float:
        """Return the mean KL to the policy that sampled, over the tokens of all ranks.

            k3 = rho - 1 - log rho,        rho = exp(logprob - old_logprob)

        J. Schulman, *Approximating KL Divergence* (2020).

        Args:
            start: The first micro-batch that counts.
            reduce_sum: Adds a tensor up over ranks.

        Returns:
            Nats per token; 0 without a micro-batch, which is so on all ranks or on none.
        """
        if len(self.sums) <= start:
            return 0.0
        column = len(self.KEYS) + self.named.index(self.KL)
        total, num_tokens = reduce_sum(torch.stack(self.sums[start:]).sum(dim=0)[[column, -1]]).tolist()
        return total / num_tokens

    def add_grad_norms(self, norms: Tensor | None) -> None:
        """Add those of an optimizer step; None where they are not known."""
        if norms is not None:
            self.grad_norms.append(norms)

    def _mean_grad_norms(self) -> Iterable[Tensor]:
        """Average over the steps, without those that fp16's loss scaling skips because of overflow."""
        if not self.grad_norms:
            return ()
        norms = torch.stack(self.grad_norms).to(self.sums[0].device)  # on the CPU where FSDP2 offloads parameters
        return norms.where(norms.isfinite().all(dim=1, keepdim=True), math.nan).nanmean(dim=0)

    def drop_last(self, count: int) -> None:
        """Drop the last micro-batches, whose optimizer step was skipped."""
        del self.sums[len(self.sums) - count :]

    def metrics(self, reduce_sum: Callable[[Tensor], Tensor], gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Average over all tokens of all ranks.

        Args:
            reduce_sum: Adds a tensor up over ranks.
            gather: Concatenates over ranks along the first dimension.

        Returns:
            Token means by `KEYS` and `named`, and of the micro-batches of all ranks `val/ratio_var`, the variance of
            their mean ratios, and `val/first_logratio`, the root mean square of the log-ratio in the first ones, which
            are before any step: how far two forward passes of the same policy are apart.
            `NLL` is a mean over the tokens of positive responses, and left out where there are none. `OF_VALUES` are
            means over the tokens whose values count.
            Nothing if no micro-batch was added, which is so on all ranks or on none.
        """
        if not self.sums:
            return {}
        of_parts = torch.stack(self.sums)
        *sums, num_tokens = reduce_sum(of_parts.sum(dim=0)).tolist()
        num_ptx_tokens, ptx = (sums.pop(), sums.pop()) if self.learns_ptx else (0.0, 0.0)
        of_ratios = of_parts[:, [self.KEYS.index("val/ratio"), self.KEYS.index("policy/approxkl_avg"), -1]]
        ratio_sums, halves_of_squares, num_tokens_of_parts = gather(of_ratios).unbind(dim=1)
        half_of_squares, num_first = (
            sums[:: len(of_parts)].sum() for sums in (halves_of_squares, num_tokens_of_parts)
        )
        ratios = (ratio_sums / num_tokens_of_parts)[num_tokens_of_parts > 0]
        first_logratio = (2 * half_of_squares / num_first.clamp(min=1)).sqrt()
        first, *norms = torch.stack([first_logratio, *self._mean_grad_norms()]).tolist()
        means = {key: total / num_tokens for key, total in zip((*self.KEYS, *self.named), sums, strict=True)}
        if (share := means.get(self.POSITIVE)) is not None:
            nll = means.pop(self.NLL)  # so far a mean over all tokens
            means |= {self.NLL: nll / share} if share > 0 else {}
        if (share := means.pop(self.VALUED, None)) is not None:
            means |= {key: means[key] / share for key in self.OF_VALUES}
        return {
            **means,
            **{key: norm for key, norm in zip(self.NORMS, norms, strict=False) if math.isfinite(norm)},
            **({"loss/ptx_avg": ptx / num_ptx_tokens} if num_ptx_tokens > 0 else {}),
            **({} if self.num_epochs is None else {"policy/kl_stop_epoch": float(self.num_epochs)}),
            "val/ratio_var": float(ratios.var()) if len(ratios) > 1 else 0.0,
            "val/first_logratio": first,
        }
