"""The same looped weights in transformers: a Llama whose layers are the core's, once per step, all steps sharing them.

padded        `generate` over left-padded prompts: every row runs until the longest answer has ended
Continuous    the continuous batching of the library, its manager kept running
"""

import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from looplab.models.base import build
from looplab.models.looped import LoopedConfig, NoEnvelope
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.mlp import SwiGLU
from looplab.nn.norm import RMSNorm
from looplab.nn.rope import Rope
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.plan import ModelLoop

LAYERS, STEPS = 4, 4


def twins(dim: int, vocab: int, steps: int = STEPS) -> tuple[Any, Any]:
    """A Llama of steps * LAYERS layers with LAYERS layers of weights, and our looped model with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads, hidden = dim // 64, int(2.75 * dim)
    native = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=dim, num_hidden_layers=LAYERS * steps, num_attention_heads=heads, num_key_value_heads=heads,
            intermediate_size=hidden, vocab_size=vocab, max_position_embeddings=256, rms_norm_eps=1e-6,
            tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    layers = native.model.layers
    for i, layer in enumerate(layers[LAYERS:], LAYERS):
        for (name, _), shared in zip(list(layer.named_parameters()), layers[i % LAYERS].parameters(), strict=True):
            owner, _, last = name.rpartition(".")
            setattr(layer.get_submodule(owner), last, shared)
    ours = build(
        LoopedConfig(
            dim=dim, vocab=vocab, ffn=SwiGLU(hidden=hidden), norm=RMSNorm(eps=1e-6), head=Head(tied=True),
            attention=Attention(heads=heads, kv_heads=heads, head_dim=64, position=Rope(base=10000.0)),
            blocks=(LAYERS,), envelope=NoEnvelope(), order=ModelLoop(num_steps=steps),
            trained_depth=FixedDepth(num_steps=steps), max_positions=256,
        )
    )  # fmt: skip
    theirs = native.state_dict()
    names = {"embedding.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
    for i in range(LAYERS):
        old = f"model.layers.{i}"
        names |= {f"core.{i}.attn.{n}.weight": f"{old}.self_attn.{n}_proj.weight" for n in "qkvo"}
        names |= {f"core.{i}.ffn.{n}.weight": f"{old}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
        names |= {f"core.{i}.attn_in.weight": f"{old}.input_layernorm.weight"}
        names |= {f"core.{i}.ffn_in.weight": f"{old}.post_attention_layernorm.weight"}
    ours.load_state_dict({name: theirs[old] for name, old in names.items()})
    return native, ours


def padded(
    native: Any,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[list[int]], float]:
    """Greedy answers, each cut to its own length, and the seconds they took. Prompts are of one length."""
    start = clock()
    ids = torch.tensor([list(prompt) for prompt in prompts], device=native.device)
    longest = max(outputs)
    with torch.no_grad():
        found = native.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest, min_new_tokens=longest, do_sample=False
        )
    seconds = clock() - start
    return [row[ids.shape[1] :][:count] for row, count in zip(found.tolist(), outputs, strict=True)], seconds


class Continuous:
    """The library's continuous batching with its own defaults, kept running from request to request.

    Its start (memory for the cache, warm-up, a thread) takes seconds and belongs to no request. By default the cache
    takes 60 % of the memory of the machine; here it holds four times what the rows need.

    Args:
        rows: Requests that are expected at a time; the manager is sized by such hints, as `generate_batch` does.
        prompt, output: Longest of each, tokens.
    """

    def __init__(self, native: Any, *, rows: int, prompt: int, output: int):
        from transformers import ContinuousBatchingConfig, GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        _check_psutil(native)
        sized = ContinuousBatchingConfig()
        sized.num_blocks = 4 * rows * -(-(prompt + output) // sized.page_size)
        config = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
        hints = WorkloadHints(max_prompt_length=prompt, max_generated_length=output, num_requests=rows)
        with torch.no_grad():
            self.manager = native.init_continuous_batching(
                generation_config=config, continuous_batching_config=sized, workload_hints=hints
            )
            self.manager.warmup()
            self.manager.start()

    def answer(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[int], clock: Callable[[], float] = time.perf_counter
    ) -> tuple[list[list[int]], float]:
        """Greedy answers, and the seconds from the first submission to the last result."""
        start = clock()
        places = {}
        for place, (prompt, count) in enumerate(zip(prompts, outputs, strict=True)):
            places[self.manager.add_request(list(prompt), max_new_tokens=count)] = place
        found: dict[int, list[int]] = {}
        while len(found) < len(prompts):
            result = self.manager.get_result(timeout=1)
            if result is None and not self.manager.is_running():
                raise RuntimeError("transformers: continuous batching stopped before all was answered")
            if result is not None and result.error is not None:
                raise RuntimeError(f"transformers: {result.error}")
            if result is not None and result.is_finished():
                found[places[result.request_id]] = list(result.generated_tokens)
        return [found[place] for place in range(len(prompts))], clock() - start

    def close(self) -> None:
        """Ends the manager."""
        self.manager.stop(block=True)
        self.manager.destroy()


def _check_psutil(native: Any) -> None:
    if native.device.type == "cpu" and importlib.util.find_spec("psutil") is None:
        raise ValueError("transformers must see the memory of the machine. Got no psutil. Install psutil")
