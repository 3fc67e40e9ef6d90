"""Tiny vision-language models of nine classes with their processors, made without a download and without torchvision.

Image processors are transformers' PIL classes. No processor takes videos: transformers needs torchvision for them.
"""

from __future__ import annotations

import importlib
from collections import namedtuple
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.utils.hub import PushToHubMixin

from tests.conftest import make_tokenizer

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "initializer_range": 0.3, "vision_use_head": False, "projection_dim": 32,
}  # fmt: skip
QWEN_TOWER = TOWER | {"depth": 2, "num_heads": 2, "out_hidden_size": 32, "window_size": 16}
QWEN_ENDS = {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
SIGLIP, CLIP = {"model_type": "siglip_vision_model"}, {"model_type": "clip_vision_model"}
SIZE = {"size": {"height": 8, "width": 8}}
CROP = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
PIXELS = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 256}}
GRID = {"image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]]}
PATCHES = {"patch_size": 4, "num_additional_image_tokens": 1}
FULL, DEFAULT = ({"vision_feature_select_strategy": name} for name in ("full", "default"))
TOKENS = {
    **dict.fromkeys(["image_token", "context_image_token"], "<image>"), "video_token": "<video>",
    **dict.fromkeys(["boi_token", "start_image_token", "vision_start_token"], "<img>"),
    **dict.fromkeys(["eoi_token", "end_image_token", "vision_end_token"], "</img>"),
    "audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>",
    "fake_token": "<fake_token_around_image>", "global_token": "<global-img>",
}  # fmt: skip
"""The names that processors and configurations have for special tokens."""


Kind: Any = namedtuple(
    "Kind", "processor images_of images text vision config given placeholder", defaults=[{}, {}, "<image>"]
)
"""The names of a processor and of its image processor's module; arguments; what stands for an image in a chat."""
KINDS = {
    "gemma3": Kind("Gemma3", "gemma3", SIZE, {"model_type": "gemma3_text", **SLIDING}, SIGLIP,
                   {"mm_tokens_per_image": 4}, {"image_seq_length": 4}, "<img>"),
    "gemma4": Kind("Gemma4", "gemma4", {"patch_size": 2, "max_soft_tokens": 70},
                   {"model_type": "gemma4_text", **SLIDING, "global_head_dim": 8, "vocab_size_per_layer_input": 48,
                    "hidden_size_per_layer_input": 4, "use_bidirectional_attention": "vision"},
                   {"model_type": "gemma4_vision", "patch_size": 2, "num_key_value_heads": 2, "head_dim": 8,
                    "position_embedding_size": 64}, {"audio_config": None}),
    "llava": Kind("Llava", "clip", CROP, {"model_type": "llama"}, CLIP, {"vision_feature_layer": -1, **FULL},
                  PATCHES | FULL),
    "llava_next": Kind("LlavaNext", "llava_next", CROP | GRID, {"model_type": "llama"}, CLIP,
                       {"vision_feature_layer": -1, **DEFAULT, **GRID}, PATCHES | DEFAULT),
    "idefics3": Kind("Idefics3", "idefics3", {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}},
                     {"model_type": "llama"}, {"model_type": "idefics3_vision"}, {"scale_factor": 2},
                     {"image_seq_len": 1}),
    "paligemma": Kind("PaliGemma", "siglip", SIZE, {"model_type": "gemma"}, SIGLIP,
                      {"projection_dim": 32}),
    "qwen2_5_vl": Kind("Qwen2_5_VL", "qwen2_vl", PIXELS, {"model_type": "qwen2_5_vl_text", "rope_parameters": M_ROPE},
                       {"model_type": "qwen2_5_vl", **QWEN_TOWER, **QWEN_ENDS}, placeholder="<img><image></img>"),
    "qwen3_vl": Kind("Qwen3VL", "qwen2_vl", PIXELS, {"model_type": "qwen3_vl_text", "rope_parameters": M_ROPE},
                     {"model_type": "qwen3_vl", **QWEN_TOWER, **QWEN_ENDS}, placeholder="<img><image></img>"),
    "internvl": Kind("InternVL", "got_ocr2", SIZE | {"max_patches": 2, "crop_to_patches": True},
                     {"model_type": "qwen2"},
                     {"model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4]},
                     {"downsample_ratio": 0.5}, {"image_seq_length": 1}),
}  # fmt: skip
TEMPLATE = """{% for message in messages %}{{ message['role'] }} {% if message['content'] is string %}{{
message['content'] }}{% else %}{% for block in message['content'] %}{% if block['type'] == 'image' %}PLACEHOLDER{%
else %}{{ block['text'] }}{% endif %}{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"""


class Absent(PushToHubMixin):
    """Stands for a processor of videos or sounds."""

    _auto_class = None
    model_input_names = ()

    def to_dict(self) -> dict[str, Any]:
        return {}


def make_processor(name: str) -> Any:
    """Return the processor of a class, with a chat template."""
    kind, core = KINDS[name], make_tokenizer().backend_tokenizer
    ends = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "padding_side": "left"}
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, extra_special_tokens=TOKENS, **ends)
    module: Any = importlib.import_module(
        f"transformers.models.{kind.images_of}.image_processing_pil_{kind.images_of}"
    )
    (images,) = (value for key, value in vars(module).items() if key in module.__all__)
    theirs: Any = getattr(transformers, f"{kind.processor}Processor")
    parts = {part: Absent() for part in theirs.get_attributes()} | {"tokenizer": tokenizer}
    parts["image_processor"] = images(**kind.images)
    parts["image_processor"].image_seq_length = 4  # read by PaliGemma alone
    anything = {"check_argument_for_proper_class": lambda self, name, argument: type(argument)}
    template = TEMPLATE.replace("PLACEHOLDER", kind.placeholder)
    return type(theirs.__name__, (theirs,), anything)(**parts, chat_template=template, **kind.given)


def make_model(name: str, processor: Any, seed: int = 0) -> Any:
    """Return a model with random weights, whose vocabulary is that of a processor."""
    torch.manual_seed(seed)
    kind, tokenizer = KINDS[name], processor.tokenizer
    ids = {f"{key}_id": tokenizer.convert_tokens_to_ids(token) for key, token in TOKENS.items()}
    parts = {"text_config": {**TEXT, **kind.text, "vocab_size": len(tokenizer)}, "vision_config": TOWER | kind.vision}
    config = CONFIG_MAPPING[name](**parts, **kind.config, **ids)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():  # Gemma 3's projection begins with zeros, and would show no image
        if weight.dim() > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.3)
    return model


def picture(number: int, width: int = 8, height: int = 8) -> Image.Image:
    """Return an image of random pixels."""
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8))


def image_rows(counts: tuple[int, ...] = (0, 1, 3)) -> list[dict[str, Any]]:
    """Return rows with that many images of several shapes, and prompts of several lengths."""
    sizes, rows = [(8, 8), (16, 8), (8, 16)], list[dict[str, Any]]()
    for row, count in enumerate(counts):
        words = " ".join(f"w{(3 * row + word) % 29}" for word in range(2 + 3 * row))
        images = [picture(10 * row + image, *sizes[(row + image) % 3]) for image in range(count)]
        rows.append({"prompt": [{"role": "user", "content": words}], "images": images})
    return rows


def alone(processor: Any, row: dict[str, Any], answer: str | None = None) -> dict[str, Any]:
    """Return what a processor makes of one row, as a prompt or with an answer."""
    blocks = [{"type": "image", "image": image} for image in row["images"]]
    messages = [{"role": "user", "content": [*blocks, {"type": "text", "text": row["prompt"][0]["content"]}]}]
    messages += [] if answer is None else [{"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    how = {"add_generation_prompt": answer is None, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    made = processor.apply_chat_template(messages, **how)
    return {name: value for name, value in made.items() if name != "labels"}
