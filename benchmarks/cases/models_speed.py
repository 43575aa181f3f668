"""Speed of models, each against a rival in the same process. Both sides give the same numbers before a time is printed.

Times are processor seconds of this process, on one thread: other work on the machine disturbs them less than the wall
clock. A ratio is rival / ours, so above 1 we are faster; `low` and `high` are the smallest and largest paired ratio.
"""

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import plain_training
from benchmarks.timing import paired, ratio
from looplab.data.packing import Batch, Position
from looplab.models.base import PRESETS, build
from looplab.models.dense import DenseConfig
from looplab.models.looped import Envelope, LoopedConfig
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.mlp import SwiGLU
from looplab.nn.norm import RMSNorm
from looplab.nn.rope import Rope
from looplab.objectives import NextToken
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.gradient import FullBPTT
from looplab.recurrence.kv import Anchor, Average, DepthIndexed, First, Modulo, Single
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.plan import ModelLoop
from looplab.training.step import TrainingStep

DIM, HEADS, HIDDEN, VOCAB = 256, 4, 688, 4096


def compared(case: str, rival: Callable[[], Any], ours: Callable[[], Any], pairs: int, **more: Any) -> dict[str, Any]:
    """One row of the table."""
    slow, fast = paired(rival, ours, pairs=pairs, clock=time.process_time)
    found = ratio(slow, fast)
    return {
        "case": case, "rival s": found["slow_seconds"], "ours s": found["fast_seconds"],
        "ratio": found["ratio"], "low": found["ratio_low"], "high": found["ratio_high"], **more,
    }  # fmt: skip


def attention() -> Attention:
    """Four heads of 64."""
    return Attention(heads=HEADS, kv_heads=HEADS, head_dim=DIM // HEADS, position=Rope(base=10000.0))


def core(num_steps: int) -> LoopedConfig:
    """One prelude layer, one core of two layers, one coda layer."""
    return LoopedConfig(
        dim=DIM,
        vocab=VOCAB,
        attention=attention(),
        ffn=SwiGLU(hidden=HIDDEN),
        order=ModelLoop(num_steps=num_steps),
        blocks=(2,),
        envelope=Envelope(prelude=1, coda=1),
        trained_depth=FixedDepth(num_steps=num_steps),
    )


def dense_twins() -> tuple[Any, Any]:
    """A Llama of the library, and ours with its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    native = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=DIM, num_hidden_layers=8, num_attention_heads=HEADS, num_key_value_heads=HEADS,
            intermediate_size=HIDDEN, vocab_size=VOCAB, max_position_embeddings=2048, rms_norm_eps=1e-6,
            tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, pad_token_id=None,
        )
    ).eval()  # fmt: skip
    ours = build(
        DenseConfig(
            dim=DIM, vocab=VOCAB, layers=8, attention=attention(), ffn=SwiGLU(hidden=HIDDEN), norm=RMSNorm(eps=1e-6),
            head=Head(tied=True),
        )
    )  # fmt: skip
    theirs = native.state_dict()
    names = {"embedding.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight"}
    for i in range(8):
        names |= {f"layers.{i}.attn.{n}.weight": f"model.layers.{i}.self_attn.{n}_proj.weight" for n in "qkvo"}
        names |= {f"layers.{i}.ffn.{n}.weight": f"model.layers.{i}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
        norms = (("attn_in", "input_layernorm"), ("ffn_in", "post_attention_layernorm"))
        names |= {f"layers.{i}.{n}.weight": f"model.layers.{i}.{o}.weight" for n, o in norms}
    ours.load_state_dict({name: theirs[old] for name, old in names.items()})
    return native, ours


def greedy(model: Any, ids: Tensor, count: int) -> Tensor:
    """Cached greedy decoding through our loop."""
    found = [ids]
    with torch.no_grad():
        cache = new_cache(model.spec, rows=len(ids), capacity=ids.shape[1] + count)
        for _ in range(count):
            logits = forward(model, found[-1], cache=cache, logits_to_keep=1).logits
            assert logits is not None
            found.append(logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(found, dim=1)


def decode_vs_generate(options: Any) -> list[dict[str, Any]]:
    """Cached greedy decoding of a dense model against `generate` of transformers on the same weights; target 1.0."""
    from looplab.interop.citizen import LooplabForCausalLM

    native, ours = dense_twins()
    wrapped = LooplabForCausalLM.wrap(ours)
    rows, count = [], 48
    for batch in (1, 4):
        ids = torch.randint(0, VOCAB, (batch, 64), generator=torch.Generator().manual_seed(1))

        def rival(ids: Tensor = ids) -> Any:
            with torch.no_grad():
                return native.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)

        assert torch.equal(rival(), greedy(ours, ids, count)), "the two sides say different tokens"
        rows.append(
            compared(f"{batch} rows, our loop", rival, functools.partial(greedy, ours, ids, count), options.pairs)
        )

        def through_wrapper(ids: Tensor = ids) -> Any:
            with torch.no_grad():
                return wrapped.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)

        assert torch.equal(rival(), through_wrapper()), "the wrapper says other tokens"
        rows.append(compared(f"{batch} rows, our generate", rival, through_wrapper, options.pairs))
    return rows


def train_vs_plain(options: Any) -> list[dict[str, Any]]:
    """Training step of the trainer's parts against a loop written by hand, losses equal to the bit; target 0.95."""
    tokens = torch.randint(0, VOCAB, (4, 129), generator=torch.Generator().manual_seed(2))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    places = torch.arange(128).expand(4, 128).contiguous()
    batch = Batch(
        tokens=inputs, labels=labels, positions=places, document_ids=None, rows=torch.arange(4),
        start=Position(0, 0, 0), data_hash="",
    )  # fmt: skip
    models = [build(core(4)), build(core(4))]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in models]
    step, plan = TrainingStep(models[0], NextToken(), FullBPTT()), models[0].spec.plan()
    losses: tuple[list[float], list[float]] = ([], [])

    def ours() -> None:
        optimizers[0].zero_grad(set_to_none=True)
        objective = step.objective
        output = step(batch, plan, None, _counts(objective, labels, plan), ledger=Ledger())
        output.share.backward()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in models[0].parameters() if p.grad is not None]))
        if norm > 1:
            for parameter in models[0].parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1 / norm)
        optimizers[0].step()
        losses[0].append(output.parts.total)

    def rival() -> None:
        losses[1].append(plain_training.step(models[1], optimizers[1], inputs, labels, 4))

    ours(), rival()
    assert abs(losses[0][0] - losses[1][0]) <= 1e-6 * losses[1][0], losses
    row = compared("4 x 128 tokens, T 4", rival, ours, options.pairs)
    with torch.no_grad():
        same = float(plain_training.loss(models[0], inputs, labels, 4))
        again = float(step(batch, plan, None, _counts(step.objective, labels, plan)).share)
    assert same == again, f"losses differ: {same} and {again}"
    return [row | {"losses": "equal to the bit"}]


def _counts(objective: Any, labels: Tensor, plan: Any) -> dict[str, int]:
    return objective.counts(labels, len(plan))


def kv_decode(options: Any) -> list[dict[str, Any]]:
    """One new token after S cached ones, under every rule, against the same read with S = 512 of one slot."""
    model, rows = build(core(4)), []
    rules = (DepthIndexed(), Single(), First(), Average(), Modulo(m=2), Anchor(n=1))
    caches: dict[Any, Any] = {}
    for rule in rules:
        for past in (512, 4096):
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                cache = new_cache(model.spec, rows=1, capacity=past + 1, rule=rule)
                forward(model, torch.ones(1, 1, dtype=torch.long), cache=cache)  # makes the slots
                cache.crop(0)
                cache.stage(torch.arange(past)[None], None)
                cache.advance(past, {0: 4})  # entries of zeros cost as much to read as others
            addresses = {key: store.data_ptr() for key, (store, _) in cache._slots.items()}

            def decode(cache: Any = cache) -> None:
                with torch.no_grad(), cache.readonly():
                    for _ in range(options.tokens):
                        forward(model, torch.ones(1, 1, dtype=torch.long), cache=cache)

            decode()
            assert addresses == {key: store.data_ptr() for key, (store, _) in cache._slots.items()}, "slots moved"
            caches[past] = decode
        rows.append(compared(f"{rule}: S 4096 over S 512", caches[4096], caches[512], options.pairs))
    return rows


def mixed_rows(options: Any) -> list[dict[str, Any]]:
    """Rows at different iterations in one launch against uniform rows; target at most 1.1 times the time."""
    rows = []
    for name in ("tiny-blocks", "tiny-loopformer"):
        config = PRESETS[name]()
        if name == "tiny-blocks":
            config = dataclasses.replace(config, dim=DIM, attention=attention(), ffn=SwiGLU(hidden=HIDDEN))
        model = build(config)
        length = min(64, model.spec.max_positions or 64)
        ids = torch.ones(8, length, dtype=torch.long)
        with torch.no_grad():
            context = model.encode(ids)
            state = model.init_state(context, None)

        def run(index: Tensor, model: Any = model, context: Any = context, state: Any = state) -> None:
            with torch.no_grad():
                for _ in range(options.tokens):
                    model.step(state, context, 0, index)

        uniform, mixed = torch.full((8,), 1), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
        with torch.no_grad():
            both = model.step(state, context, 0, mixed)[1], model.step(state, context, 0, uniform)[1]
        torch.testing.assert_close(*both)
        sides = [functools.partial(run, index) for index in (uniform, mixed)]
        rows.append(compared(f"{name}: uniform over mixed", sides[0], sides[1], options.pairs))
    return rows


def adapter_overhead(options: Any) -> list[dict[str, Any]]:
    """The rollout of an adapter against the native forward at T = 512; target at least 0.95."""
    from looplab.interop.adapters import ADAPTERS

    native, _ = dense_twins()
    adapter, ids = ADAPTERS["llama"].wrap(native), torch.ones(1, 512, dtype=torch.long)

    def rival() -> Tensor:
        with torch.no_grad():
            return native(ids, use_cache=False).logits

    def ours() -> Any:
        with torch.no_grad():
            return forward(adapter, ids).logits

    assert torch.equal(rival(), ours()), "the adapter differs from the native forward"
    return [compared("llama, T 512", rival, ours, options.pairs)]


CASES = {
    "decode_vs_generate": decode_vs_generate,
    "train_vs_plain": train_vs_plain,
    "kv_decode": kv_decode,
    "mixed_rows": mixed_rows,
    "adapter_overhead": adapter_overhead,
}
