"""The models that the processes train."""

import pytest

from tests.conftest import tiny_policy, tiny_scorer
from tests.vision import make_model, make_processor


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A directory with `policy` (tied embeddings), `value_model`, `reward_model` and `llava`."""
    folder = tmp_path_factory.mktemp("models")
    tiny_policy(tie_word_embeddings=True).save_pretrained(folder / "policy")
    tiny_scorer(seed=2).save_pretrained(folder / "value_model")
    tiny_scorer(seed=5).save_pretrained(folder / "reward_model")
    make_model("llava", make_processor("llava")).save_pretrained(folder / "llava")
    return folder
