"""The reward model's scores, against the transformers model run by hand on one unpadded row at a time."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf_ppo.models.frozen import FrozenScorer
from rlhf_ppo.rewards import RewardModel, ScoringBatch
from tests.conftest import scoring_batch
from tests.models.architectures import tiny_model

EOS = 1


def scorer(family: str = "llama") -> PreTrainedModel:
    return tiny_model(family, AutoModelForSequenceClassification, pad_token_id=0 if family == "bert" else EOS)


# Prompt and response of each row: EOS within the prompt, as stop token, as the whole response, or absent.
ROWS = [
    ([3, 4, 5], [6, 7, EOS]),
    ([8], [EOS]),
    ([9, EOS, 10, 11], [12, 13, 14, 15, 16]),
    ([17, 18], [19, 2]),
    ([EOS, 5, 6, 7, 8], [9, EOS]),
]


def make_batch(pad: int = EOS, left: int = 0, right: int = 0) -> ScoringBatch:
    """Left-padded prompts and right-padded responses, with `left` and `right` more columns of padding than needed."""
    context, length = 5 + left, 5 + right
    ids, mask = torch.full((len(ROWS), context + length), pad), torch.zeros(len(ROWS), context + length).bool()
    for row, (prompt, response) in enumerate(ROWS):
        real = slice(context - len(prompt), context + len(response))
        ids[row, real], mask[row, real] = torch.tensor(prompt + response), True
    return scoring_batch(ids, mask, mask[:, context:], {}, torch.ones(len(ROWS)).bool())


@torch.no_grad()
def by_hand(model: PreTrainedModel) -> list[float]:
    """One row at a time, no padding: transformers then reads the last token (Llama, GPT-2) or pools (BERT)."""
    pad, model.config.pad_token_id = model.config.pad_token_id, -1  # else EOS at the end would count as padding
    scores = [model(input_ids=torch.tensor([prompt + response])).logits.item() for prompt, response in ROWS]
    model.config.pad_token_id = pad
    return scores


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("rows_per_pass", [1, 2, 4, 64])
@pytest.mark.parametrize(("pad", "left", "right"), [(EOS, 0, 0), (0, 0, 0), (EOS, 2, 3), (99, 1, 1)])
def test_scores_equal_the_model_run_by_hand(family: str, rows_per_pass: int, pad: int, left: int, right: int) -> None:
    model = scorer(family)
    expected = by_hand(model)
    assert max(expected) - min(expected) > 0.1
    rows: list[int] = []
    frozen = FrozenScorer(model)
    frozen.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    scores = RewardModel(frozen, rows_per_pass)(make_batch(pad, left, right))
    assert max(rows) == min(rows_per_pass, len(ROWS)) and sum(rows) == len(ROWS)
    assert scores.dtype == torch.float32 and not scores.requires_grad
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_score_that_is_not_finite_is_an_error_naming_the_row() -> None:
    model = scorer()
    with torch.no_grad():
        model.get_input_embeddings().weight[19] = float("nan")  # only row 3 has this token
    with pytest.raises(ValueError, match="reward model's score of row 3 is nan"):
        RewardModel(FrozenScorer(model), 2)(make_batch())
