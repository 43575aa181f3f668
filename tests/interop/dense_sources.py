"""Tiny random dense models of the families that can be retrofitted, built by the transformers library and saved."""

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

LAYERS = 6
VOCAB = 90
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = {
    "llama": ("Llama", {"head_dim": 6, "tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "hidden_act": "gelu"}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "olmo2": ("Olmo2", {}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {"head_dim": 10}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 3}),
}
"""Name -> class prefix in the library, and what is particular; the odd sizes show that nothing depends on even ones."""


def saved(folder, family, *, seed=0, tokenizer=True, shards=False, **changes):
    """The library's model with every parameter drawn anew, norms and biases too, and its folder written."""
    prefix, own = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **own, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    write(folder, model, tokenizer=tokenizer, shards=shards)
    return model


def write(folder, model, *, tokenizer=True, shards=False):
    """The folder of a model; its tokenizer knows single letters."""
    model.save_pretrained(folder, **({"max_shard_size": "20KB"} if shards else {}))
    if tokenizer:
        inner = Tokenizer(models.WordLevel({chr(32 + i): i for i in range(VOCAB)}, unk_token="?"))
        inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        inner.save(str(folder / "tokenizer.json"))


def stream(model, ids):
    """What enters layer 0, then what leaves each layer: lists of vectors, states first."""
    states = [model.get_input_embeddings()(ids)[0].tolist()]
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out: states.append((out[0] if isinstance(out, tuple) else out)[0].tolist())
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return states
