"""The models that the processes train."""

import pytest

from tests.conftest import tiny_policy, tiny_scorer
from tests.rewards.test_reward_model_tokens import character_model, character_tokenizer


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A directory with `policy` (tied embeddings), `value_model`, `reward_model`, and one that reads characters."""
    folder = tmp_path_factory.mktemp("models")
    tiny_policy(tie_word_embeddings=True).save_pretrained(folder / "policy")
    tiny_scorer(seed=2).save_pretrained(folder / "value_model")
    tiny_scorer(seed=5).save_pretrained(folder / "reward_model")
    character_model().save_pretrained(folder / "character_model")
    character_tokenizer().save_pretrained(folder / "character_model")
    return folder
