"""Scripts written for `trl.experimental.ppo` 1.12: only their import is changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2Model,
    GPT2PreTrainedModel,
    PreTrainedTokenizerFast,
    get_constant_schedule,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer_utils import TrainOutput

from rlhf_ppo import PPOConfig, PPOTrainer
from tests.conftest import make_tokenizer, tiny_policy, tiny_scorer
from tests.runs import QUICK, record_rollouts

POSTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8", "w9 w10", "w11 w12"] * 4


def tokenized(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Dataset:
    """A data set with `input_ids` and `lengths`, as `ppo_tldr.py` of TRL makes it."""

    def tokenize(element: dict[str, str]) -> dict[str, Any]:
        input_ids = tokenizer(element["prompt"], padding=False)["input_ids"]
        return {"input_ids": input_ids, "lengths": len(input_ids)}

    return Dataset.from_dict({"prompt": texts}).map(tokenize, remove_columns=["prompt"])


def trl_arguments(tmp_path: Path, **overrides: Any) -> PPOConfig:
    values = {
        **{"output_dir": str(tmp_path / "run"), "learning_rate": 1e-3, "per_device_train_batch_size": 2},
        **{"gradient_accumulation_steps": 2, "total_episodes": 12, "num_ppo_epochs": 2, "num_mini_batches": 2},
        **{"local_rollout_forward_batch_size": 3, "missing_eos_penalty": 1.0, "stop_token": "eos"},
        **{"response_length": 5, "num_sample_generations": 2, "logging_steps": 1, "report_to": "none"},
    }
    return PPOConfig(**{**values, "use_cpu": True, **overrides})


# ---- A whole script ----


def test_a_script_with_positional_arguments_in_trl_s_order(tmp_path, capsys):
    """Its tokenizer gets a PAD beyond the models' vocabulary, as in TRL's examples."""
    tokenizer = make_tokenizer(pad_token=None, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    policy, ref_policy, reward_model, value_model = tiny_policy(), tiny_policy(), tiny_scorer(1), tiny_scorer(1)
    optimizer = torch.optim.AdamW(nn.ModuleList([policy, value_model]).parameters(), lr=1e-3)
    before = {name: value.clone() for name, value in ref_policy.state_dict().items()}

    trainer = PPOTrainer(
        trl_arguments(tmp_path), tokenizer, policy, ref_policy, reward_model, tokenized(tokenizer, POSTS), value_model,
        DataCollatorWithPadding(tokenizer), tokenized(tokenizer, POSTS[:3]),
        (optimizer, get_constant_schedule(optimizer)), None, None,
    )  # fmt: skip
    output = trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    table = trainer.generate_completions()

    assert isinstance(output, TrainOutput) and output.global_step == 3
    assert trainer.state.global_step == 3 and trainer.state.episode == 12
    assert trainer.optimizer.param_groups[0]["params"][0] is optimizer.param_groups[0]["params"][0]
    assert any(not torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in ref_policy.state_dict().items())
    assert list(table.columns) == ["query", "model response", "score"]
    assert list(table["query"]) == POSTS[:3]
    assert "model response" in capsys.readouterr().out
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = tokenizer(POSTS[0], return_tensors="pt")["input_ids"]
    assert torch.equal(saved(ids).logits, policy.eval()(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token == "[PAD]"


# ---- what TRL's trainer could not do, or did not say ----


# ---- any sequence-classification model ----


class OtherNames(GPT2PreTrainedModel):
    """A causal scorer with a head and a prefix of its own names; TRL read `.score` behind `.base_model_prefix`."""

    base_model_prefix = "trunk"

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.trunk = GPT2Model(config)
        self.regression = nn.Linear(config.n_embd, 1, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> SequenceClassifierOutput:
        states = self.trunk(input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(dim=1) - 1
        return SequenceClassifierOutput(logits=self.regression(states[torch.arange(len(states)), last]))


def test_the_value_model_may_have_any_head(make_trainer):
    torch.manual_seed(4)
    value_model = OtherNames(GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=1, n_head=2, num_labels=1))
    trainer = make_trainer(value_model=value_model, **QUICK)
    before, rollouts = copy.deepcopy(value_model), record_rollouts(trainer)

    trainer.train()

    rollout, responses = rollouts[0], rollouts[0].responses
    for row, mask in enumerate(rollout.response_mask):
        num_prompt = int(responses.attention_mask[row, : responses.context_length].sum())
        ids = responses.query_responses[row][responses.attention_mask[row]][None]
        with torch.no_grad():
            every = before.regression(before.eval().trunk(ids).last_hidden_state)[0, :, 0]
        expected = every[num_prompt - 1 : -1]  # the value of the state that each token is chosen in
        torch.testing.assert_close(rollout.values[row][mask], expected, atol=1e-5, rtol=0)
    assert not torch.equal(value_model.regression.weight, before.regression.weight)
