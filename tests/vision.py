"""Tiny vision-language models of nine classes with their processors, made without a download and without torchvision.

The image processors are transformers' PIL classes; no processor takes videos, for which transformers needs torchvision.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.utils import PushToHubMixin

from tests.conftest import make_tokenizer

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "initializer_range": 0.3, "vision_use_head": False,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "depth": 2, "num_heads": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.3,
}  # fmt: skip
M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
SIZE, EDGE = {"size": {"height": 8, "width": 8}}, {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
PIXELS: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 256}}
BOTH_ENDS = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
MEDIA = {"audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>"}
VISION_TOKENS = {"video_token": "<video>", "vision_start_token": "<img>", "vision_end_token": "</img>"}


@dataclass(frozen=True)
class Kind:
    """How to make a class: its processor's name and arguments, its image processor, its configurations, its tokens.

    Attributes:
        placeholder: What the chat template writes for an image.
        ids: Names in the configuration of the ids of tokens.
    """

    processor: str
    image_processor: str
    images: dict[str, Any]
    text: dict[str, Any]
    vision: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=lambda: {"image_token": "<image>"})
    ids: dict[str, str] = field(default_factory=lambda: {"image_token_id": "<image>"})
    placeholder: str = "<image>"


LLAVA: dict[str, Any] = {"patch_size": 4, "vision_feature_select_strategy": "full"}
KINDS = {
    "gemma3": Kind(
        "Gemma3", "gemma3.Gemma3", SIZE, {"model_type": "gemma3_text", **SLIDING},
        {"model_type": "siglip_vision_model", **TOWER}, {"mm_tokens_per_image": 4}, {"image_seq_length": 4},
        {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
        {"image_token_id": "<image>", "boi_token_id": "<boi>", "eoi_token_id": "<eoi>"}, "<boi>",
    ),
    "gemma4": Kind(
        "Gemma4", "gemma4.Gemma4", {"patch_size": 2, "max_soft_tokens": 70},
        {"model_type": "gemma4_text", **SLIDING, "global_head_dim": 8, "vocab_size_per_layer_input": 48,
         "hidden_size_per_layer_input": 4, "use_bidirectional_attention": "vision"},
        {"model_type": "gemma4_vision", **TOWER, "patch_size": 2, "num_key_value_heads": 2, "head_dim": 8,
         "position_embedding_size": 64}, {"audio_config": None}, {},
        {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", **MEDIA},
        {"image_token_id": "<image>", "boi_token_id": "<boi>", "eoi_token_id": "<eoi>", "audio_token_id": "<audio>",
         "boa_token_id": "<boa>", "eoa_token_id": "<eoa>", "video_token_id": "<|video|>"},
    ),
    "llava": Kind(
        "Llava", "clip.CLIP", EDGE, {"model_type": "llama"}, {"model_type": "clip_vision_model", **TOWER},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {**LLAVA, "num_additional_image_tokens": 1},
    ),
    "llava_next": Kind(
        "LlavaNext", "llava_next.LlavaNext", {**EDGE, "image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]]},
        {"model_type": "llama"}, {"model_type": "clip_vision_model", **TOWER},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "default",
         "image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]]},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "idefics3": Kind(
        "Idefics3", "idefics3.Idefics3", {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}},
        {"model_type": "llama"}, {"model_type": "idefics3_vision", **TOWER}, {"scale_factor": 2}, {"image_seq_len": 1},
        {"fake": "<fake_token_around_image>", "global": "<global-img>", "image": "<image>"},
    ),
    "paligemma": Kind(
        "PaliGemma", "siglip.Siglip", SIZE, {"model_type": "gemma"},
        {"model_type": "siglip_vision_model", **TOWER, "projection_dim": 32}, {"projection_dim": 32},
    ),
    "qwen2_5_vl": Kind(
        "Qwen2_5_VL", "qwen2_vl.Qwen2VL", PIXELS,
        {"model_type": "qwen2_5_vl_text", "rope_parameters": M_ROPE},
        {"model_type": "qwen2_5_vl", **QWEN, "window_size": 16, "fullatt_block_indexes": [1]}, {}, {},
        {"image_token": "<image>", **VISION_TOKENS},
        {"image_token_id": "<image>", "video_token_id": "<video>", "vision_start_token_id": "<img>",
         "vision_end_token_id": "</img>"}, "<img><image></img>",
    ),
    "qwen3_vl": Kind(
        "Qwen3VL", "qwen2_vl.Qwen2VL", PIXELS,
        {"model_type": "qwen3_vl_text", "rope_parameters": M_ROPE},
        {"model_type": "qwen3_vl", **QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}, {}, {},
        {"image_token": "<image>", **VISION_TOKENS},
        {"image_token_id": "<image>", "video_token_id": "<video>", "vision_start_token_id": "<img>",
         "vision_end_token_id": "</img>"}, "<img><image></img>",
    ),
    "internvl": Kind(
        "InternVL", "got_ocr2.GotOcr2", {**SIZE, "max_patches": 2, "crop_to_patches": True},
        {"model_type": "qwen2"}, {"model_type": "internvl_vision", **TOWER, "image_size": [8, 8],
                                  "patch_size": [4, 4]}, {"downsample_ratio": 0.5}, {"image_seq_length": 1},
        {"context_image_token": "<image>", **BOTH_ENDS},
    ),
}  # fmt: skip
TEMPLATE = """{%% for message in messages %%}{{ message['role'] }} {%% if message['content'] is string %%}{{
message['content'] }}{%% else %%}{%% for block in message['content'] %%}{%% if block['type'] == 'image' %%}%s{%% else %%}{{
block['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%} {%% endfor %%}{%% if add_generation_prompt %%}w9{%% endif %%}"""


class Absent(PushToHubMixin):
    """Stands for the video processor and the one of sounds."""

    _auto_class = None
    model_input_names = ()

    def to_dict(self) -> dict[str, Any]:
        return {}


def make_processor(name: str) -> Any:
    """Return the processor of a class, with a chat template."""
    kind, transformers = KINDS[name], importlib.import_module("transformers")
    tokenizer = make_tokenizer()
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", eos_token="<eos>",
        bos_token="<bos>", padding_side="left", extra_special_tokens=kind.tokens)  # fmt: skip
    module, _, prefix = kind.image_processor.partition(".")
    images: Any = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    parts: dict[str, Any] = {"image_processor": getattr(images, f"{prefix}ImageProcessorPil")(**kind.images)}
    if name == "paligemma":
        parts["image_processor"].image_seq_length = 4
    theirs: Any = getattr(transformers, f"{kind.processor}Processor")
    if "video_processor" in theirs.get_attributes():
        parts["video_processor"] = Absent()
        anything = {"check_argument_for_proper_class": lambda self, name, argument: type(argument)}
        theirs = type(theirs.__name__, (theirs,), anything)
    if "feature_extractor" in theirs.get_attributes():
        parts["feature_extractor"] = Absent()
    template = TEMPLATE % kind.placeholder
    return theirs(**parts, tokenizer=tokenizer, chat_template=template, **kind.given)


def make_model(name: str, processor: Any, seed: int = 0) -> Any:
    """Return a model with random weights, whose vocabulary is that of a processor."""
    torch.manual_seed(seed)
    kind, tokenizer = KINDS[name], processor.tokenizer
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in kind.ids.items()}
    text, vision = {**TEXT, **kind.text, "vocab_size": len(tokenizer)}, dict(kind.vision)
    config: Any = CONFIG_MAPPING[name](text_config=text, vision_config=vision, **kind.config, **ids)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():  # Gemma 3's projection begins with zeros, and would show no image
        if weight.dim() > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.3)
    return model


def picture(number: int, width: int = 8, height: int = 8) -> Image.Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def image_rows(counts: tuple[int, ...] = (0, 1, 3)) -> list[dict[str, Any]]:
    """Return rows with that many images of several shapes, and prompts of several lengths."""
    sizes = [(8, 8), (16, 8), (8, 16)]
    return [
        {
            "prompt": [{"role": "user", "content": " ".join(f"w{(3 * row + word) % 29}" for word in range(2 + 3 * row))}],
            "images": [picture(10 * row + image, *sizes[(row + image) % 3]) for image in range(count)],
        }
        for row, count in enumerate(counts)
    ]
