"""Images of prompts: conversations through a processor, and the tensors that rows add to their tokens.

Data sets are those of TRL's `GRPOTrainer`: a conversation in `prompt`; images in `images`, `image` or its own blocks.
"""

from __future__ import annotations

import base64
import io
import itertools
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch import Tensor, nn
from transformers import ProcessorMixin
from transformers.image_utils import load_image

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_COLUMNS = ("images", "image")
"""Columns of a data set, in TRL's order: a list of images, or one."""
IMAGES_COLUMN = "<images>"
"""Column of a batch with the `RowImages` of each row."""

THUMBNAIL = 96
"""Longest edge of an image in tables and reports, pixels."""

_TOKEN_TYPES = "token_type_ids"
"""Ends the names of fields with a number for each token."""


@dataclass(frozen=True)
class RowImages:
    """The images of a row's prompt, and the tensors that a processor makes of them.

    Attributes:
        fields: The processor's tensors, on the host; those of tokens are `(C,)`.
        ids: The prompt's token ids.
        pictures: The images.
        of_response: Token type of what follows the prompt, and of all tokens of a row without the field.
        spare: A row with an image, for passes of several processes in which no row has one.
    """

    fields: Mapping[str, Tensor]
    ids: Sequence[int] = ()
    pictures: Sequence[Any] = ()
    of_response: int = 0
    spare: RowImages | None = None


def with_spare(
    rows: Sequence[RowImages], input_ids: Tensor, attention_mask: Tensor, left: bool = False
) -> tuple[list[RowImages], Tensor, Tensor]:
    """Add the spare row to a batch if no row has an image and there is one.

    The vision tower then runs on all ranks, which wait for each other where it is sharded or has gradients.

    Args:
        rows: The images of `B` rows.
        input_ids: Token ids, long `(B, L)`.
        attention_mask: 1 on real tokens, long `(B, L)`.
        left: Whether rows are padded on the left.
    """
    spare = rows[0].spare
    if spare is None or any(row.pictures for row in rows):
        return [*rows], input_ids, attention_mask
    ids = torch.tensor([spare.ids], device=input_ids.device)
    width = max(ids.shape[1], input_ids.shape[1])

    def joined(batch: Tensor, row: Tensor) -> Tensor:
        room = [width - part.shape[1] for part in (batch, row)]
        sides = [(empty, 0) if left else (0, empty) for empty in room]
        return torch.cat([nn.functional.pad(part, side) for part, side in zip((batch, row), sides, strict=True)])

    return [*rows, spare], joined(input_ids, ids), joined(attention_mask, torch.ones_like(ids))


def model_inputs(rows: Sequence[RowImages], attention_mask: Tensor) -> dict[str, Tensor]:
    """Return the fields of a batch: images concatenated, token types at the places of the tokens.

    Args:
        rows: The images of `B` rows.
        attention_mask: 1 on real tokens, long `(B, L)`, padded on either side.
    """
    device, fields = attention_mask.device, dict[str, Tensor]()
    for name in dict.fromkeys(name for row in rows for name in row.fields):
        if name.endswith(_TOKEN_TYPES):
            types = torch.tensor([[row.of_response] for row in rows]).repeat(1, attention_mask.shape[1])
            for of_tokens, start, row in zip(types, attention_mask.argmax(dim=1).tolist(), rows, strict=True):
                if name in row.fields:
                    of_tokens[:start] = 0
                    of_tokens[start : start + len(row.ids)] = row.fields[name]
            fields[name] = types.to(device)
        else:
            fields[name] = _concatenated([row.fields[name] for row in rows if name in row.fields]).to(device)
    return fields


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension, with zeros at the ends of the others, as processors pad a batch."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    whole = parts[0].new_zeros(sum(map(len, parts)), *shape)
    for part, end in zip(parts, itertools.accumulate(map(len, parts)), strict=True):
        whole[(slice(end - len(part), end), *map(slice, part.shape[1:]))] = part
    return whole


def images_of(row: Mapping[str, object]) -> list[Any] | None:
    """Return the images in a row's columns, as TRL reads them; None without a column."""
    for column in IMAGE_COLUMNS:
        if column in row:
            images = row[column]
            return [] if images is None else [*images] if isinstance(images, list | tuple) else [images]
    return None


def opened(image: Any) -> object:
    """Convert an image to what transformers takes, from bytes, a `file://` address or a dict of `datasets` too.

    Args:
        image: A Pillow image, bytes, a path or address, or a dict with `bytes` or `path`.
    """
    if isinstance(image, bytes):
        image = {"bytes": image}
    if isinstance(image, Mapping):
        return datasets.Image().decode_example({"path": image.get("path"), "bytes": image.get("bytes")})
    is_file = isinstance(image, str) and image.startswith("file://")
    return urllib.request.url2pathname(urllib.parse.urlsplit(image).path) if is_file else image


def image_blocks(prompt: object) -> list[Mapping[str, Any]]:
    """Return the blocks of images in a conversation."""
    messages = prompt if isinstance(prompt, list | tuple) else []
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return [block for block in blocks if isinstance(block, Mapping) and block.get("type") == "image"]


def data_url(picture: Image, longest_edge: int | None = None) -> str:
    """Return an image as a `data:` URL, also as a thumbnail.

    Args:
        picture: A Pillow image.
        longest_edge: Of the thumbnail, pixels; None keeps the size.
    """
    buffer, copy = io.BytesIO(), picture.convert("RGB")
    if longest_edge is not None:
        copy.thumbnail((longest_edge, longest_edge))
    copy.save(buffer, "PNG" if longest_edge is None else "JPEG")
    kind = "png" if longest_edge is None else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def thumbnails(row: RowImages) -> list[str]:
    """Return a row's images as small `data:` URLs, for tables and reports."""
    return [data_url(picture, THUMBNAIL) for picture in row.pictures if hasattr(picture, "convert")]


def shows_images(dataset: Any, thorough: bool = True) -> bool:
    """Return whether a data set has a column of images, or conversations with blocks of images.

    Args:
        dataset: A data set, a dict of them, or None.
        thorough: Also read the first row of a stream, and each row whose contents may be blocks; a column of images
            that is empty in all rows counts.
    """
    if isinstance(dataset, Mapping):
        return any(shows_images(part, thorough) for part in dataset.values())
    is_stream = not hasattr(dataset, "__len__")
    if dataset is None or (is_stream and not thorough):
        return False
    try:
        first = next(iter(dataset), {}) if is_stream else dataset[0]
        prompt = first.get("prompt")
    except Exception:  # an image that cannot be read, whose row is named when it is encoded
        return True
    if image_blocks(prompt):
        return True
    columns = [column for column in IMAGE_COLUMNS if column in first]
    if columns:
        return thorough or _has_values(dataset, columns)
    if is_stream or not thorough:
        return False
    if isinstance(dataset, datasets.Dataset):  # Arrow has one type for all contents
        if not (isinstance(prompt, list) and any(isinstance(part.get("content"), list) for part in prompt)):
            return False
        dataset = dataset.select_columns("prompt")
    return any(image_blocks(dataset[row].get("prompt")) for row in range(len(dataset)))


def _has_values(dataset: Any, columns: Sequence[str]) -> bool:
    """Return whether a row has an image in these columns; a `datasets.Dataset` does not decode them."""
    if not isinstance(dataset, datasets.Dataset):
        return any(images_of(dataset[row]) for row in range(len(dataset)))
    rows: Any = dataset.select_columns([*columns]).with_format("arrow")
    return any(images_of(row) for table in rows.iter(1000) for row in table.to_pylist())


def as_blocks(
    messages: Sequence[Mapping[str, object]], images: Sequence[object] | None = None
) -> list[dict[str, Any]]:
    """Return a conversation whose contents are lists of blocks, with the images in their places, as TRL does."""
    from trl.data_utils import prepare_multimodal_messages  # slow to import

    shown = prepare_multimodal_messages([*map(dict, messages)], [*images] if images else None)
    for message in shown:
        if isinstance(message.get("content"), list):
            blocks = message["content"]
            message["content"] = [
                {**block, "image": opened(block["image"])} if block.get("image") is not None else block
                for block in blocks
            ]
    return shown


def without_placeholders(text: str, processor: ProcessorMixin) -> str:
    """Return a response without the tokens that a processor replaces by images, videos and sounds."""
    for kind in ("image", "video", "audio"):
        text = text.replace(getattr(processor, f"{kind}_token", None) or "\0", "")
    return text


@dataclass(frozen=True)
class ImageChats:
    """Conversations with images, encoded as by TRL's `GRPOTrainer`.

    Attributes:
        processor: The policy's processor of images and text.
        spare: A row with an image, for several processes, or None.
    """

    processor: Any
    spare: RowImages | None = None

    @classmethod
    def of(cls, processor: Any, num_processes: int) -> ImageChats:
        """Make the spare row if there are several processes."""
        chats = cls(processor)
        if num_processes == 1:
            return chats
        from PIL import Image

        blocks = [{"type": "image", "image": Image.new("RGB", (32, 32), "gray")}, {"type": "text", "text": "a"}]
        spare, _ = chats.encoded([{"role": "user", "content": blocks}], None, {})
        return replace(chats, spare=spare)

    def of_model(self, processor: ProcessorMixin | None, num_processes: int) -> ImageChats:
        """Return the encoding for a model that may have its own processor."""
        return self if processor is None else ImageChats.of(processor, num_processes)

    def encoded(
        self, prompt: Sequence[Mapping[str, object]], images: Sequence[object] | None, settings: Mapping[str, Any]
    ) -> tuple[RowImages, list[dict[str, Any]]]:
        """Encode a conversation.

        Args:
            prompt: The conversation.
            images: Images for its placeholders, or to open the first message of the user.
            settings: Further arguments of the chat template.

        Returns:
            The row's ids and images, and the conversation with the images in its blocks.
        """
        messages = as_blocks(prompt, images)
        prefilled = messages[-1]["role"] == "assistant"
        fields = self.processor.apply_chat_template(
            [messages],
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **settings,
        )
        pictures = [block["image"] for block in image_blocks(messages)]
        return self._row(
            fields, [load_image(image) if isinstance(image, str) else image for image in pictures]
        ), messages

    def of_text(self, text: str, pictures: Sequence[object]) -> RowImages:
        """Encode a text of the chat template."""
        images = [[*pictures]] if pictures else None
        fields = self.processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")
        return self._row(fields, pictures)

    def _row(self, fields: Mapping[str, Any], pictures: Sequence[object]) -> RowImages:
        """Return the tokens and images of a processor's output for one row."""
        others = {
            name: value for name, value in fields.items() if name not in ("input_ids", "attention_mask", "labels")
        }
        tensors = {name: value[0] if name.endswith(_TOKEN_TYPES) else value for name, value in others.items()}
        return RowImages(tensors, fields["input_ids"][0].tolist(), pictures, self._of_response, self.spare)

    def of_ids(self, ids: Sequence[int]) -> RowImages:
        """Return a row of a text, without images."""
        # Without the field PaliGemma would read answers in both directions too.
        types = {_TOKEN_TYPES: torch.zeros(len(ids), dtype=torch.long)} if self._of_response else {}
        return RowImages(types, ids, of_response=self._of_response, spare=self.spare)

    @property
    def _of_response(self) -> int:
        is_prefix = type(self.processor).__name__.startswith("PaliGemma")  # its prompt reads itself in both directions
        return int(is_prefix)
