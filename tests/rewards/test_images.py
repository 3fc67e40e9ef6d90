"""Reward models that read images, and the requests that carry them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rlhf_ppo.data.images import IMAGES_COLUMN, ImageChats
from rlhf_ppo.data.prompts import ImageCollator, PromptCollator, PromptEncoder
from rlhf_ppo.data.rollout import Prompts
from rlhf_ppo.generation.sampling import SpecialTokens, join_responses
from rlhf_ppo.models.frozen import FrozenScorer
from rlhf_ppo.models.loading import make_value_model
from rlhf_ppo.rewards.endpoint import as_json
from rlhf_ppo.rewards.reward_model import RewardModel
from rlhf_ppo.rewards.scorer import Answer, ScoringBatch
from tests.vision import alone, image_rows, make_model, make_processor, picture


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_a_score_is_that_of_the_conversation_with_its_images_alone(name: str) -> None:
    """A placeholder that the policy wrote stands for nothing."""
    processor = make_processor(name)
    tokenizer, rows = processor.tokenizer, image_rows((0, 1, 3))
    model: Any = make_value_model(make_model(name, processor))
    torch.nn.init.normal_(model.score.weight)
    chats = ImageChats(processor)
    encode = PromptEncoder(tokenizer, "rows", None, chats=chats)
    batch = ImageCollator(PromptCollator(0), encode)([row | encode(row, 0) for row in rows])
    prompts = Prompts.from_collated(batch, torch.device("cpu"))
    written = torch.tensor([[5, 6, 1], [7, processor.image_token_id, 8], [9, 10, 11]])
    responses = join_responses(prompts, written, 1, 0)
    assert responses.images == batch[IMAGES_COLUMN]
    scored = ScoringBatch(responses, prompts, SpecialTokens(0, (1,), (1,)).ended(responses), (1,), tokenizer)
    scores = RewardModel(FrozenScorer(model), 3, chats=chats)(scored)

    for row, ids, score in zip(rows, ([5, 6], [7, 8], [9, 10, 11]), scores.tolist(), strict=True):
        fields = alone(processor, row, tokenizer.decode(ids))
        expected = model.score(model.base_model(**fields).last_hidden_state)[0, -1, 0]
        assert score == pytest.approx(float(expected), abs=1e-4)


def test_a_raw_text_in_a_batch_of_conversations_is_read_as_it_is() -> None:
    processor = make_processor("gemma3")
    tokenizer = processor.tokenizer
    model: Any = make_value_model(make_model("gemma3", processor))
    torch.nn.init.normal_(model.score.weight)
    reward_model = RewardModel(FrozenScorer(model), 3, chats=ImageChats(processor))
    ids = tokenizer("w3 w4")["input_ids"]
    text = Answer("w3 w4", "w5", prompt_ids=ids, response_ids=[5, 1], tokenizer=tokenizer, ended=True)
    chat = Answer([{"role": "user", "content": "w3 w4"}], "w5", tokenizer=tokenizer)
    both = reward_model.score_answers([chat, text], lambda _: None)
    assert both[1] == pytest.approx(float(model(torch.tensor([[*ids, 5, 1]])).logits), abs=1e-4)


def test_a_server_gets_images_as_urls() -> None:
    assert json.loads(json.dumps([picture(1)], default=as_json))[0].startswith("data:image/png;base64,")
    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps([object()], default=as_json)
