"""A tiny random model of every adapted family, built by the transformers library and saved as a folder of its own."""

import torch
import transformers

VOCAB = 96

DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
NO_KV_HEADS = {name: value for name, value in DENSE.items() if name not in ("num_key_value_heads", "head_dim")}
INKLING = DENSE | {
    "num_hidden_layers": 8,
    "unpadded_vocab_size": VOCAB - 6,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 8,
    "sliding_window_size": 4,
    "d_rel": 4,
    "rel_extent": 6,
    "log_scaling_n_floor": 4,
    "layer_types": ["hybrid_sliding", "hybrid"] * 4,
    "conv_kernel_size": 3,
    "moe_intermediate_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_layers_per_attn_res_block": 2,
    "loop_layer_index_start": 2,
    "loop_layer_index_end": 6,
    "loop_num_passes": 3,
    "loop_gate_rank": 4,
    "initializer_range": 0.05,
}
del INKLING["intermediate_size"]

CONFIGS = {
    "llama": ("Llama", DENSE),
    "llama-tied": ("Llama", DENSE | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", DENSE | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", DENSE),
    "mistral": ("Mistral", DENSE | {"sliding_window": 4}),
    "olmo": ("Olmo", DENSE),
    "olmo2": ("Olmo2", DENSE),
    "smollm3": ("SmolLM3", DENSE | {"no_rope_layer_interval": 2}),
    "gemma": ("Gemma", DENSE),
    "gemma2": ("Gemma2", DENSE | {"sliding_window": 4, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0}),
    "gemma3": ("Gemma3", DENSE | {"sliding_window": 4, "sliding_window_pattern": 2}),
    "gpt_neox": ("GPTNeoX", NO_KV_HEADS | {"use_parallel_residual": True}),
    "gpt_neox-serial": ("GPTNeoX", NO_KV_HEADS | {"use_parallel_residual": False, "hidden_dropout": 0.1}),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "opt": ("OPT", NO_KV_HEADS | {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    "opt-post": ("OPT", NO_KV_HEADS | {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "dory": (
        "Dory",
        DENSE
        | {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3}
        | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "dory-last": (
        "Dory",
        DENSE
        | {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 0, "n_recurrent_loops": 2}
        | {"recurrent_kv_cache_mode": "last_loop"},
    ),
    "hrm_text": ("HrmText", NO_KV_HEADS | {"num_hidden_layers": 2, "head_dim": 8, "H_cycles": 2, "L_cycles": 3}),
    "inkling2_loop": ("Inkling2Loop", INKLING),
    "albert": (
        "Albert",
        NO_KV_HEADS
        | {"embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 1, "inner_group_num": 1}
        | {"hidden_act": "gelu", "attention_probs_dropout_prob": 0.1},
    ),
    "albert-groups": (
        "Albert",
        NO_KV_HEADS | {"embedding_size": 16, "num_hidden_layers": 5, "num_hidden_groups": 2, "inner_group_num": 2},
    ),
}
"""Name -> class prefix in the library, and its configuration."""

CONFIG_CLASSES = {"Gemma3": "Gemma3TextConfig", "Inkling2Loop": "Inkling2LoopTextConfig"}
MODEL_CLASSES = {"GPT2": "GPT2LMHeadModel", "Albert": "AlbertForMaskedLM"}
LOOPED = ("dory", "dory-last", "hrm_text", "inkling2_loop")
ALBERTS = ("albert", "albert-groups")
CACHED = tuple(name for name in CONFIGS if name not in ("inkling2_loop", "dory-last", *ALBERTS))


def native(name: str, seed: int = 0):
    """The library's model, every parameter drawn anew: its own initial values would hide mistakes behind zeros."""
    prefix, options = CONFIGS[name]
    config = getattr(transformers, CONFIG_CLASSES.get(prefix, f"{prefix}Config"))(**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, MODEL_CLASSES.get(prefix, f"{prefix}ForCausalLM"))(config)
        with torch.no_grad():
            for label, parameter in model.named_parameters():
                if label != "model.z_L_init":
                    parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()
