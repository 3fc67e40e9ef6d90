"""Columns and blocks of images, what cannot be read, and the batches that carry them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from PIL import Image as Pillow

from rlhf_ppo.data.images import IMAGES_COLUMN, ImageChats, data_url, shows_images
from rlhf_ppo.data.prompts import ImageCollator, PromptCollator, PromptEncoder, prepare_prompts
from rlhf_ppo.data.sources import load_splits
from tests.vision import make_processor, picture

ASKED = [{"role": "user", "content": "w3 w4"}]


@pytest.fixture(scope="module")
def encode() -> PromptEncoder:
    processor = make_processor("llava")
    return PromptEncoder(processor.tokenizer, "train_dataset", None, chats=ImageChats(processor))


def block(**given: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", **given}, {"type": "text", "text": "w3 w4"}]}]


def test_column_list_and_block_are_one_prompt(encode: PromptEncoder) -> None:
    image = picture(1)
    rows = [{"prompt": prompt, "images": [image]} for prompt in (ASKED, block())]
    rows += [{"prompt": ASKED, "image": image}, {"prompt": block(image=image)}]
    ids = [encode(row, 0)["input_ids"] for row in rows]
    assert ids[1:] == ids[:-1] and ids[0].count(encode.tokenizer.convert_tokens_to_ids("<image>")) == 5
    batch = ImageCollator(PromptCollator(0), encode)(prepare_prompts(rows, encode))
    assert [row.pictures for row in batch[IMAGES_COLUMN]] == [[image]] * 4
    assert [prompt[0]["content"][0]["image"] for prompt in batch["prompt"]] == [image] * 4


@pytest.mark.parametrize("columns", [{"images": []}, {"images": None}, {"image": None}, {}])
def test_rows_without_images_stay_texts(columns: dict[str, Any], encode: PromptEncoder) -> None:
    assert encode.chats is not None
    text = encode.chats.processor.apply_chat_template([ASKED], add_generation_prompt=True)[0]
    for prompt, expected in ((ASKED, text), ("w3 w4", "w3 w4")):
        row = {"prompt": prompt} | columns
        ids = encode(row, 0)["input_ids"]
        assert ids == encode.tokenizer(expected)["input_ids"]
        (shown,) = ImageCollator(PromptCollator(0), encode)([row | {"input_ids": ids}])[IMAGES_COLUMN]
        assert not shown.pictures


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "w3", "image": picture(1)}, "has images, which cannot be read here: make the prompt a conv"),
        ({"prompt": ASKED, "images": ["missing.png"]}, r"with its images \(Incorrect image source.*missing.png"),
        ({"prompt": block(), "images": [picture(1)] * 2}, r"provided \(2\) does not match .* placeholders \(1\)"),
        (
            {"prompt": block()},
            r"with its images .*provided \(0\) .* placeholders \(1\).*as many images as placeholders",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}], "images": []}, "block of type 'audio'"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(row: dict[str, Any], message: str, encode: PromptEncoder) -> None:
    with pytest.raises(ValueError, match=f"row 7 of train_dataset .*{message}"):
        encode(row, 7)


def jpeg() -> bytes:
    buffer = io.BytesIO()
    picture(1, 32, 24).save(buffer, "JPEG")
    return buffer.getvalue()


def table(*images: bytes) -> Dataset:
    features = Features({"prompt": [{"role": Value("string"), "content": Value("string")}], "image": Image()})
    return Dataset.from_list([{"prompt": ASKED, "image": {"bytes": each}} for each in images], features)


def test_a_broken_file_is_named_and_pixels_stay_as_they_are(encode: PromptEncoder) -> None:
    """`Dataset.map` would compress a JPEG a second time."""
    with pytest.raises(ValueError, match="row 1 of train_dataset has an image that cannot be read"):
        prepare_prompts(table(jpeg(), b"no image"), encode)
    with pytest.raises(ValueError, match=r"row 0 of train_dataset has an image that cannot be read .Truncated"):
        prepare_prompts(table(jpeg()[:400]), encode)
    given, read = table(jpeg(), jpeg()), Pillow.open(io.BytesIO(jpeg()))
    stream = iter(prepare_prompts(given.to_iterable_dataset(), encode))
    for prepared in (prepare_prompts(given, encode)[1], next(stream)):
        np.testing.assert_array_equal(np.asarray(prepared["image"]), np.asarray(read))
        assert prepared["input_ids"] == encode(given[1], 1)["input_ids"]


def test_which_data_sets_have_images(tmp_path: Path) -> None:
    text = {"prompt": ASKED}
    assert shows_images([text, {"prompt": block()}]) and shows_images({"a": [text], "b": [text | {"image": None}]})
    assert shows_images(table(jpeg()).to_iterable_dataset()) and shows_images(table(b"no image"))
    called = [*ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": called}))
    assert not shows_images(load_splits(str(tmp_path / "chats.jsonl"))["train"])
    assert shows_images([text] * 2 + [{"prompt": block()}]) and not shows_images([text, {"prompt": block()}], False)
    assert not any(map(shows_images, ([text], Dataset.from_list([text]), iter([text]), None, [{"prompt": "w3"}])))


def test_an_image_is_read_in_every_form_that_data_sets_have(encode: PromptEncoder, tmp_path: Path) -> None:
    image, path = picture(1), tmp_path / "a b.png"
    image.save(path)
    stored = {"bytes": path.read_bytes(), "path": None}
    forms = [path.read_bytes(), stored, {"bytes": None, "path": str(path)}, path.as_uri(), str(path)]
    rows: list[dict[str, Any]] = [{"prompt": ASKED, "image": form} for form in forms]
    rows += [{"prompt": ASKED, "image": [image]}, {"prompt": ASKED, "images": image}]
    rows += [{"prompt": block(image=form)} for form in forms]
    (read, *others) = [encode.with_images(row) for row in [{"prompt": ASKED, "images": [image]}, *rows]]
    assert read is not None
    for shown in others:
        assert shown is not None and shown[0].ids == read[0].ids
        assert torch.equal(shown[0].fields["pixel_values"], read[0].fields["pixel_values"])
    both = encode.with_images({"prompt": ASKED, "image": [image, picture(2)]})
    assert both is not None and len(both[0].pictures) == 2


@pytest.mark.parametrize("as_dataset", [True, False])
def test_a_column_without_an_image_shows_none_to_a_model_of_texts(as_dataset: bool) -> None:
    features = Features({"prompt": [{"role": Value("string"), "content": Value("string")}], "images": [Image()]})
    for images, shows in (([None, []], False), ([[], [picture(1)]], True)):
        rows = [{"prompt": ASKED, "images": each} for each in images]
        assert shows_images(Dataset.from_list(rows, features) if as_dataset else rows, thorough=False) == shows
    assert shows_images([{"prompt": ASKED, "image": None}, {"prompt": ASKED, "image": picture(1)}], thorough=False)


def test_a_thumbnail_is_small() -> None:
    url = data_url(picture(1, 400, 200), 96)
    assert url.startswith("data:image/jpeg;base64,") and len(url) < 12_000 < len(data_url(picture(1, 400, 200)))
