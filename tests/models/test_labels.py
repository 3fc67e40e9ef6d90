"""One label of a classifier with several: the same numbers as the whole model gives for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_ppo.models.frozen import FrozenScorer
from rlhf_ppo.models.loading import keep_label, label_index, load_reward_model, make_value_model, num_labels
from tests.conftest import tiny_scorer
from tests.models.test_heads import tiny_classifier

NAMES = {0: "helpful", 1: "1", 2: "harmless"}
IDS = torch.tensor([[5, 6, 7, 8], [9, 3, 4, 2]])
ALL = ["llama", "gpt2", "gpt_neox", "opt", "qwen2", "bert", "roberta", "distilbert", "modernbert", "deberta-v2"]


@pytest.mark.parametrize("model_type", ALL)
@pytest.mark.parametrize(("label", "index"), [("helpful", 0), ("harmless", 2), ("2", 2)])
def test_the_kept_label_scores_as_in_the_whole_model(model_type: str, label: str, index: int) -> None:
    model = tiny_classifier(model_type, num_labels=3, id2label=NAMES)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        assert (expected[:, 0] - expected[:, 2]).abs().min() > 1e-4
        kept = keep_label(model, label)
        ours = kept(input_ids=IDS).logits
        assert ours.shape == (2, 1)
        assert ours[:, 0].tolist() == pytest.approx(expected[:, index].tolist(), abs=1e-6)
        scores = FrozenScorer(kept)(IDS, torch.ones_like(IDS).bool())
    assert scores.tolist() == pytest.approx(expected[:, index].tolist(), abs=1e-5)
    assert num_labels(kept) == 1


def test_a_name_comes_before_a_position() -> None:
    config = tiny_scorer(id2label=NAMES, num_labels=3).config
    assert [label_index(config, label) for label in ("helpful", "1", "harmless", "0", "2")] == [0, 1, 2, 0, 2]
    config.id2label = {0: "1", 1: "0"}
    assert [label_index(config, label) for label in ("1", "0")] == [0, 1]


@pytest.mark.parametrize("label", ["helpfull", "3", "-1", ""])
def test_a_label_that_is_not_there_is_an_error_that_names_those_that_are(label: str) -> None:
    with pytest.raises(ValueError, match=rf"reward_head='{label}' is not a label .*\['helpful', '1', 'harmless'\]"):
        keep_label(tiny_scorer(num_labels=3, id2label=NAMES), label)


def test_labels_that_are_no_rows_of_one_layer_are_refused() -> None:
    class Mixing(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).softmax(dim=-1)

    model = tiny_scorer(num_labels=3, id2label=NAMES)
    model.score = Mixing(32, 3, bias=False)
    with pytest.raises(ValueError, match="computes its labels from more than one linear layer"):
        keep_label(model, "helpful")
    model = tiny_scorer(num_labels=3, id2label=NAMES)
    model.second = torch.nn.Linear(32, 3)
    with pytest.raises(ValueError, match="has 2 linear layers with 3 outputs"):
        keep_label(model, "helpful")


def test_from_a_directory_and_through_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_scorer(num_labels=3, id2label=NAMES).eval()
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        expected = model(input_ids=IDS).logits[:, 2].tolist()
        loaded = load_reward_model(str(tmp_path / "base"), "reward_model", "harmless")
        assert loaded(input_ids=IDS).logits[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
        base = type(model).from_pretrained(tmp_path / "base")
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        expected = adapted.eval()(input_ids=IDS).logits[:, 2].tolist()
        adapted.save_pretrained(tmp_path / "adapter")
        for given in (str(tmp_path / "adapter"), adapted):
            scores = load_reward_model(given, "reward_model", "harmless")(input_ids=IDS).logits[:, 0]
            assert scores.tolist() == pytest.approx(expected, abs=1e-5)


def test_several_labels_and_none_named(tmp_path: Path) -> None:
    model = tiny_scorer(num_labels=3, id2label=NAMES)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"num_labels=3.*\['helpful', '1', 'harmless'\] with reward_head"):
        load_reward_model(model, "reward_model", None)
    with pytest.raises(ValueError, match="of several labels reward_head takes one"):
        load_reward_model(str(tmp_path), "reward_model", None)
    with pytest.raises(ValueError, match=r"reward_head='helpful' is not a label .*\['LABEL_0'\]"):
        load_reward_model(tiny_scorer(), "reward_model", "helpful")
    assert num_labels(load_reward_model(tiny_scorer(), "reward_model", "0")) == 1


def test_a_value_model_can_be_made_from_it() -> None:
    reward = keep_label(tiny_scorer(num_labels=3, id2label=NAMES).eval(), "harmless")
    value_model = make_value_model(reward)
    with torch.no_grad():
        assert value_model.eval()(input_ids=IDS).logits.tolist() == reward(input_ids=IDS).logits.tolist()
