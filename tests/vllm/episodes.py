"""Episodes of several turns with real vLLM, in any of its modes, and what must hold for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from rlhf_ppo import PPOTrainer
from tests.vllm.training import EOS, NEAR, first_logs, make_vllm_trainer, policy_of

STOP = 13
"""Ends a turn; the model's own EOS does not."""
LENGTH = 40
"""Tokens of an episode."""


class Counter:
    """Says how many words a turn had, modulo 20: the vocabulary is small."""

    takes_messages = True

    def __init__(self, most: int = 4) -> None:
        self.most = most

    def reset(self, **row: Any) -> str:
        self.turn_rewards: list[float] = []
        self.done = False
        return "w20"

    def respond(self, text: str) -> str:
        self.turn_rewards.append(1.0)
        self.done = len(self.turn_rewards) == self.most
        return f"w{len(text.split()) % 20} w21"


class Text:
    """An episode's turns and what stands between them, as token ids."""

    def __init__(self, responses: Any, row: int) -> None:
        self.turns: list[list[int]] = []
        self.gaps: list[list[int]] = []
        behind, before = responses.episode_mask[row], None
        for token, written in zip(
            responses.response_ids[row][behind].tolist(), responses.response_mask[row][behind].tolist(), strict=True
        ):
            parts = self.turns if written else self.gaps
            if written != before:
                parts.append([])
            parts[-1].append(token)
            before = written


def check_episodes(saved: Path, output_dir: Path, turns: int = 4, **given: Any) -> dict[str, int]:
    """Train two updates of episodes with at most so many turns; vLLM must see every turn's context and limits.

    Returns:
        The numbers of calls of vLLM, and of episodes with several turns.
    """
    rows = Dataset.from_list([{"prompt": f"w{row % 9} w{row % 7}"} for row in range(32)])
    trainer = make_vllm_trainer(
        saved, output_dir, train_dataset=rows, eval_dataset=None, response_length=LENGTH, stop_token=None,
        stop_token_id=STOP, environment_factory=lambda: Counter(turns), **given,
    )  # fmt: skip
    calls, played = _recorded(trainer)
    trainer.train()

    for prompts, answers, most in calls:
        assert len(prompts) == len(answers)
        for ids in answers:
            assert STOP not in ids[:-1] and (ids[-1] == STOP or len(ids) == most)
    if turns > 1:
        assert len({most for *_, most in calls}) > 2
        assert any(EOS in ids[:-1] for _, answers, _ in calls for ids in answers)
    texts = [Text(responses, row) for responses, _ in played for row in range(len(responses))]
    for text in texts:
        expected = [[3 + sum(token > 2 for token in turn) % 20, 3 + 21] for turn in text.turns]  # w0 is token 3
        assert text.gaps == expected[: len(text.gaps)], (text.turns, text.gaps)
        assert len(text.turns) - len(text.gaps) in (0, 1)
        assert len(text.turns) <= turns and sum(map(len, text.turns + text.gaps)) <= LENGTH
    for responses, own in played:
        mask = responses.response_mask
        assert torch.isfinite(responses.sampling_logprobs[mask]).all()
        assert (own - responses.sampling_logprobs)[mask].abs().max() < NEAR
        assert (responses.sampling_logprobs[~mask] == 0).all()
    if trainer.accelerator.is_main_process:
        logs = first_logs(trainer)
        assert len(logs) == 2 and [log["val/first_logratio"] for log in logs] == [0, 0]
        assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < NEAR
    return {"calls": len(calls), "several": sum(len(text.turns) > 1 for text in texts)}


def _recorded(trainer: PPOTrainer) -> tuple[list[Any], list[Any]]:
    """Record what vLLM was asked, and what was played with the policy's log-probabilities at that time."""
    calls, played, vllm = [], [], trainer.sampler.engine.vllm  # type: ignore
    generate, collect = vllm.generate, trainer.collect_rollout

    def asked(prompts: list[list[int]], **how: Any) -> Any:
        answer = generate(prompts, **how)
        calls.append((prompts, answer[1], vllm.max_completion_length))
        return answer

    def kept(*given: Any) -> Any:
        rollout = collect(*given)
        responses = rollout.responses
        positions = (responses.attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = policy_of(trainer)(
                responses.query_responses, attention_mask=responses.attention_mask, position_ids=positions
            ).logits[:, responses.context_length - 1 : -1]
        own = (logits / trainer.args.temperature).log_softmax(dim=-1)
        own = own.gather(-1, responses.response_ids[..., None]).squeeze(-1)
        played.append((responses, own))
        return rollout

    vllm.generate, trainer.collect_rollout = asked, kept
    return calls, played
