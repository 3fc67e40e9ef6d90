"""`value_model="policy"`: one body for policy and value, whose head reads the policy's own last hidden states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrainerCallback

from rlhf_ppo.models.heads import ValueHead
from rlhf_ppo.models.packing import pack_rows
from rlhf_ppo.models.policy_and_value import PolicyAndValue, response_logprobs
from tests.conftest import prompt_rows, tiny_policy, tiny_scorer
from tests.episodes import RespondsInTurns
from tests.models.test_logprobs import ragged_batch
from tests.models.test_one_base import mean_id
from tests.models.test_peft import lora, trained_adapter
from tests.runs import QUICK, InOnePass, MakeTrainer, die_and_resume, logged, record

ONE_BODY: dict[str, Any] = {"value_model": "policy", "reward_funcs": mean_id, "learning_rate": 0.01}
ONE_STEP = ONE_BODY | QUICK | {"gradient_accumulation_steps": 4, "total_episodes": 8, "max_grad_norm": 0.0}
TOKENS = lora(task_type="CAUSAL_LM", trainable_token_indices=[3, 4])
POLICIES: dict[str, Callable[[], nn.Module]] = {
    "packed": tiny_policy,
    "padded": lambda: tiny_policy(attn_implementation="eager"),
    "adapted": trained_adapter,
    "trained tokens, which wrap the tied head": lambda: get_peft_model(tiny_policy(tie_word_embeddings=True), TOKENS),
}


def drawn_head(policy: nn.Module) -> ValueHead:
    head = ValueHead(policy)
    generator = torch.Generator().manual_seed(4)
    for parameter in head.parameters():
        nn.init.normal_(parameter, generator=generator)
    return head


def by_hand(head: ValueHead, states: Tensor) -> Tensor:
    hidden, _, last = cast(Any, head.score)
    return torch.special.ndtr(z := states @ hidden.weight.T + hidden.bias).mul(z) @ last.weight[0]


def states_alone(policy: Any, ids: Tensor) -> Tensor:
    """The last hidden states of a row, in plain transformers."""
    return policy(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0]


@pytest.mark.parametrize("kind", POLICIES)
@torch.no_grad()
def test_values_are_the_head_over_the_hidden_states_of_the_row_alone(kind: str) -> None:
    policy, (ids, mask, response_mask) = POLICIES[kind]().eval(), ragged_batch()
    head = drawn_head(policy)
    alone = [by_hand(head, states_alone(policy, row[real])) for row, real in zip(ids, mask, strict=True)]
    pack_rows(policy)
    model = PolicyAndValue(policy, head, temperature=0.7)
    assert model.packs_rows == (kind != "padded")
    output, only = model(ids, mask, response_mask), model(ids, mask, response_mask, only="value_model")
    for row, length in enumerate(response_mask.sum(dim=1).tolist()):
        torch.testing.assert_close(output.values[row, :length], alone[row][-length - 1 : -1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.final_values[row], alone[row][-1], rtol=1e-5, atol=1e-5)
    assert not output.values[~response_mask].any() and torch.equal(only.values, output.values)
    assert torch.equal(output.logprobs, response_logprobs(policy, ids, mask, response_mask, 0.7).logprobs)


class FirstGradients(TrainerCallback):
    """Keeps the gradients and weights of the first optimizer step."""

    trainer: Any

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            parts = self.trainer.policy_model, self.trainer.value_model
            self.policy, self.critic = ({name: each.grad for name, each in part.named_parameters()} for part in parts)
            self.policy, self.critic = copy.deepcopy((self.policy, self.critic))
            self.body = copy.deepcopy(self.trainer.policy_model)


def first_step(make_trainer: MakeTrainer, **given: Any) -> tuple[FirstGradients, Any, Any]:
    """Take a step with a head that is not 0; return its gradients, rollout and experience."""
    seen = FirstGradients()
    trainer = seen.trainer = make_trainer(**ONE_STEP | given, callbacks=[seen])
    if isinstance(trainer.value_model, ValueHead):
        trainer.value_model.load_state_dict(drawn_head(trainer.policy_model).state_dict())
    rollouts, experiences = record(trainer, "collect_rollout"), record(trainer, "estimate_advantages")
    trainer.train()
    return seen, rollouts[0], experiences[0]


def test_the_policys_gradient_is_that_beside_a_separate_critic_and_without_a_value_loss(
    make_trainer: MakeTrainer,
) -> None:
    critic = tiny_scorer()
    critic.model.load_state_dict(tiny_policy().model.state_dict())
    cast(Any, critic).score = drawn_head(tiny_policy()).score
    ours, *_ = first_step(make_trainer)
    for other in ({"vf_coef": 0.0}, {"value_model": critic}):
        theirs, *_ = first_step(make_trainer, **other)
        for name, gradient in theirs.policy.items():
            assert gradient.any() and torch.equal(ours.policy[name], gradient), name


PASSES: dict[str, dict[str, Any]] = {
    **{"episodes": {"trainer_class": RespondsInTurns}, "packed micro-batches": {"max_tokens_per_micro_batch": 12}},
    **{"padded rows": {"model": "padded"}, "checkpointing": {"gradient_checkpointing": True}},
}


@pytest.mark.parametrize("given", PASSES.values(), ids=PASSES)
def test_the_heads_gradient_is_that_of_a_regression_by_hand(make_trainer: MakeTrainer, given: dict[str, Any]) -> None:
    given = {name: POLICIES[value]() if name == "model" else value for name, value in given.items()}
    seen, rollout, experience = first_step(make_trainer, vf_coef=0.3, **given)
    head = drawn_head(seen.body)
    errors = []
    for row, real in enumerate(rollout.responses.attention_mask):
        states, learned = torch.zeros(len(real), 32), rollout.response_mask[row]
        states[real] = states_alone(seen.body, rollout.responses.query_responses[row, real]).detach()
        errors.append(by_hand(head, states[-len(learned) - 1 : -1][learned]) - experience.returns[row, learned])
    (0.3 * 0.5 * torch.cat(errors).square().mean()).backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.norm() > 0.1, name
        torch.testing.assert_close(seen.critic[name], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "given", [{}, {"trainer_class": InOnePass}, PASSES["checkpointing"], {"critic_warmup_steps": 2}]
)
def test_the_body_runs_once_for_a_rollout_and_once_for_each_micro_batch(
    make_trainer: MakeTrainer, given: dict[str, Any]
) -> None:
    run = {"gradient_accumulation_steps": 2, "total_episodes": 12}
    trainer, uses_cache = make_trainer(**ONE_BODY | QUICK | run | given), []
    body = trainer.policy_model.model
    body.register_forward_pre_hook(lambda _, args, given: uses_cache.append(given["use_cache"]), with_kwargs=True)
    trainer.train()
    assert uses_cache.count(False) == 3 * (1 + 2)  # the others generate
    assert sum(each.numel() for each in trainer.value_model.parameters()) == 32 * 32 + 32 + 32


RESUMED: dict[str, Callable[[], dict[str, Any]]] = {
    "all weights": lambda: {"critic_warmup_steps": 1, "gradient_checkpointing": True},
    "LoRA over a shared base, in bf16": lambda: {"peft_config": lora(), "share_base_model": True, "bf16": True},
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_resumes_to_the_bit(make_trainer: MakeTrainer, tmp_path: Path, case: str) -> None:
    resumed, _ = die_and_resume(make_trainer, tmp_path, lambda: {**ONE_BODY, **RESUMED[case]()})
    assert resumed.value_model.score[-1].weight.any()
    assert [path.name for path in tmp_path.glob("died/checkpoint-3/value_model/*")] == ["value_head.safetensors"]


def test_what_is_saved_is_a_plain_language_model_and_a_head_from_which_a_run_starts(
    make_trainer: MakeTrainer, tmp_path: Path, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(**ONE_BODY | QUICK)
    trainer.train()
    trainer.save_model(str(tmp_path))
    recwarn.clear()
    caplog.clear()
    load: Any = AutoModelForCausalLM.from_pretrained
    policy, info = load(tmp_path, output_loading_info=True)
    assert not any(info.values()) and not recwarn.list and not caplog.records
    for name, weight in trainer.policy_model.state_dict().items():
        assert torch.equal(policy.state_dict()[name], weight), name
    assert {path.name for path in tmp_path.glob("**/*.safetensors")} == {"model.safetensors", "value_head.safetensors"}
    again = make_trainer(**ONE_BODY | QUICK | {"model": str(tmp_path), "value_model": tmp_path / "critic"})
    for name, weight in trainer.value_model.state_dict().items():
        assert torch.equal(again.value_model.state_dict()[name], weight), name


def test_the_head_learns_at_its_own_rate_what_prompts_will_score(make_trained: MakeTrainer) -> None:
    rows = [row | {"known": float(number % 5)} for number, row in enumerate(prompt_rows(16))]
    run = {"per_device_train_batch_size": 16, "num_ppo_epochs": 8, "total_episodes": 80, "response_length": 1}
    rates = {"learning_rate": 0.0, "critic_learning_rate": 0.1, "cliprange_value": 100.0}
    trainer = make_trained(
        **ONE_BODY | QUICK | run | rates | {"reward_funcs": lambda known, **_: known},
        train_dataset=Dataset.from_list(rows),
    )
    explained = logged(trainer, "val/explained_variance")
    assert explained[0] == 0.0 and explained == sorted(explained) and explained[-1] > 0.8, explained


def test_an_adapter_of_the_head_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match=r"value_model is a head on the policy, .* leave value_peft_config out"):
        make_trainer(**ONE_BODY | QUICK, value_peft_config=lora())
