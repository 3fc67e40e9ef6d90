"""Tiny models of many architectures of transformers.

`tiny_config(family)` shrinks the default configuration of a family by the names of its numbers; `CHANGES` has what a
family needs beside that.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WIDTHS = (
    "hidden_size d_model n_embd dim embedding_size embed_dim word_embed_proj_dim emb_dim d_embed lru_width "
    "decoder_hidden_size embedding_dim"
)
INNER_WIDTHS = (
    "intermediate_size ffn_dim n_inner ffn_hidden_size decoder_ffn_dim encoder_ffn_dim moe_intermediate_size d_ff dff "
    "shared_expert_intermediate_size dim_ff hidden_dim dense_intermediate_size intermediate_size_mlp "
    "shared_intermediate_size moe_shared_expert_intermediate_size shared_experts_intermediate_size"
)
LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks num_decoder_layers "
    "num_encoder_layers"
)
HEADS = "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads linear_num_heads"
SMALL: dict[str, Any] = {
    **dict.fromkeys(WIDTHS.split(), 16),
    **dict.fromkeys(INNER_WIDTHS.split(), 24),
    **dict.fromkeys(LAYERS.split(), 2),
    **dict.fromkeys(HEADS.split(), 4),
    **dict.fromkeys("num_key_value_heads num_kv_heads linear_num_key_heads".split(), 2),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 4),
    **dict.fromkeys("num_experts_per_tok num_experts_per_token moe_topk moe_k".split(), 2),
    **dict.fromkeys("n_group topk_group n_shared_experts num_expert_group first_k_dense_replace".split(), 1),
    **dict.fromkeys("max_position_embeddings n_positions n_ctx max_seq_len seq_length".split(), 64),
    **dict.fromkeys("state_size mamba_d_state ssm_state_size head_dim linear_key_head_dim".split(), 4),
    **dict.fromkeys("linear_value_head_dim linear_head_dim qk_rope_head_dim qk_nope_head_dim".split(), 4),
    **dict.fromkeys("mamba_n_heads mamba_num_heads linear_num_value_heads".split(), 4),
    **dict.fromkeys("mamba_d_head mamba_head_dim q_lora_rank kv_lora_rank index_head_dim".split(), 8),
    **dict.fromkeys("initializer_range init_std".split(), 0.3),
    **dict.fromkeys("vocab_size unpadded_vocab_size".split(), 48),
    **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "use_sliding_window": True, "max_window_layers": 1},
}
WINDOWS = (
    "sliding_window sliding_window_size attention_window_size attention_chunk_size window_size local_attention "
    "keep_window_size index_topk indexer_budget block_size"
)
"""Lengths beyond which a layer does not read all earlier tokens, or reads them in another way."""


def layers(*kinds: str) -> dict[str, Any]:
    return {"layer_types": list(kinds)}


LINEAR_AND_FULL = layers("linear_attention", "full_attention")
SLIDING_AND_FULL = layers("sliding_attention", "full_attention")
CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": LINEAR_AND_FULL,
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {**SLIDING_AND_FULL, "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}},
    "blt": {"encoder_config": {"hidden_size_global": 16}, "decoder_config": {"hidden_size_global": 16},
            "global_config": {"encoder_cross_output_size": None}, "encoder_hash_byte_group_vocab": 64},
    "codegen": {"rotary_dim": 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots3_note": {"vision_config": {"mlp_layer_types": ["dense", "dense"], "adapter_in_dim": 16,
                                     "adapter_out_dim": 16},
                   "audio_config": {"adapter_input_size": 16, "adapter_out_dim": 16}},
    "dory": {**layers("sliding_attention", "sliding_attention", "full_attention"), "num_hidden_layers": 3,
             "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24,
                                 "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4},
               "mm_tokens_per_image": 4},
    "gemma3n_text": {**SLIDING_AND_FULL, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 48,
                     "hidden_size_per_layer_input": 4, "laurel_rank": 4},
    "gemma4_text": {**SLIDING_AND_FULL, "vocab_size_per_layer_input": 48, "hidden_size_per_layer_input": 4},
    "gemma4_unified": {"vision_config": None, "audio_config": None},
    "gemma4_unified_text": SLIDING_AND_FULL,
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": layers("mamba", "attention"),
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 4, "d_rel": 4},
    "inkling2_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 4, "d_rel": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 2},
    "lfm2": layers("conv", "full_attention"),
    "lfm2_moe": layers("conv", "full_attention"),
    "lfm3": layers("conv", "full_attention"),
    "longcat_flash": {"expert_ffn_hidden_size": 24, "zero_expert_num": 2, "head_dim": 4},
    "moshi": {"audio_vocab_size": 48},
    "mamba2": {"head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "n_groups": 1},
    "qwen3_next": LINEAR_AND_FULL,
    "qwen3_5_text": LINEAR_AND_FULL,
    "qwen3_5_moe_text": LINEAR_AND_FULL,
    "qwen4_exp_text": {**LINEAR_AND_FULL, "ple_layer_ids": [1], "ple_embed_dim": 16, "heads_per_ngram": 2,
                       "hc_count": 2, "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8,
                       "split_ngram_parts": 1, "hc_lowrank": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1,
                       "indexer_head_dim": 4, "indexer_compress_ratio": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "chunk_size": 16, "mlstm_round_up_to_multiple_of": 16,
              "ffn_round_up_to_multiple_of": 8},
    "kimi_linear": LINEAR_AND_FULL,
    "deepseek_v4": {"o_lora_rank": 8},
    "zamba": {**layers("mamba", "hybrid", "hybrid"), "num_hidden_layers": 3, "attention_head_dim": 8,
              "attention_hidden_size": 32, "mamba_dt_rank": 2},
    "zamba2": {**layers("mamba", "hybrid", "hybrid"), "num_hidden_layers": 3, "hybrid_layer_ids": [1, 2],
               "adapter_rank": 4, "n_mamba_heads": 4, "mamba_ngroups": 1, "kv_channels": 8,
               "attention_head_dim": 8, "attention_hidden_size": 32, "chunk_size": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
NOT_SET: dict[str, tuple[str, ...]] = {
    "falcon": ("head_dim",),
    "prophetnet": ("num_hidden_layers",),
    "xlnet": ("max_position_embeddings",),
}
"""Names that a configuration has, and that cannot be set."""


PARTS = {
    "fuyu": {"text_config": "persimmon"},
    "got_ocr2": {"text_config": "qwen2"},
    "moss_transcribe_diarize": {"text_config": "qwen3"},
}
"""Parts of composite configurations whose default says nothing of their type."""


def small_values(family: str, config_class: Any = None, window: int = 4, **changes: Any) -> dict[str, Any]:
    """The arguments of a tiny configuration of `family`, and of those that it is composed of."""
    config_class = config_class or CONFIG_MAPPING[family]
    default = config_class()
    unsettable = NOT_SET.get(family, ()) + (("head_dim",) if "qk_rope_head_dim" in default.to_dict() else ())
    known = dir(default)  # `hasattr` would read properties, some of which raise
    small = SMALL | dict.fromkeys(WINDOWS.split(), window)
    values: dict[str, Any] = {name: value for name, value in small.items() if name in known and name not in unsettable}
    kinds = {*(getattr(default, "layer_types", None) or ())}
    local = kinds & {"sliding_attention", "chunked_attention"}
    if local and kinds <= {*local, "full_attention"}:
        values["layer_types"] = [*local, "full_attention"]
    if "qk_rope_head_dim" in default.to_dict():  # multi-head latent attention has as many keys as queries
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, part in config_class.sub_configs.items():
        if getattr(part, "model_type", None) in CONFIG_MAPPING:
            values[name] = small_values(part.model_type, part, window)
    for name, part in PARTS.get(family, {}).items():
        values[name] = {"model_type": part, **small_values(part, window=window)}
    given: dict[str, Any] = CHANGES.get(family, {}) | changes
    nested = {name: {**values.get(name, {}), **value} for name, value in given.items() if isinstance(value, dict)}
    return {**values, **given, **nested}


def tiny_config(family: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[family](**small_values(family, **changes))


def tiny_model(family: str, kind: Any = AutoModelForCausalLM, seed: int = 0, **changes: Any) -> Any:
    """A tiny model with random weights, of which no two rows or layers are alike."""
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    if kind is AutoModelForSequenceClassification:
        config.num_labels = changes.get("num_labels", 1)
    model: Any = kind.from_config(config).eval()
    for module in model.modules():  # an embedding of zeros would make keys alike, and top-k a matter of chance
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            torch.nn.init.normal_(module.weight.data[module.padding_idx])
    return model


def families() -> list[str]:
    """All families that the installed transformers offers as causal language models."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
