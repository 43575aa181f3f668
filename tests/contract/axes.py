"""One small configuration per choice of every axis of the configurable family."""

import dataclasses

from looplab.models.looped import Envelope, LoopedConfig, NoEnvelope
from looplab.nn.attention import RMS, Attention
from looplab.nn.embedding import Head
from looplab.nn.linear import Init
from looplab.nn.mlp import GatedReluSquared, GeGLU, Gelu, ReluSquared, Silu, SwiGLU
from looplab.nn.norm import BranchOnly, LayerNorm, PostSum, PreAndBranch, PreNorm, RMSNorm, SandwichSum
from looplab.nn.residual import LoomResidual, UnitResidual
from looplab.nn.rope import ALiBi, FallingBias, Learned, Llama3, NoPE, RelativeBias, Rope
from looplab.recurrence.boundary import EndNorm, NoBoundary, OwnNorm, PlainRMS, SharedFinalNorm
from looplab.recurrence.depth import FixedDepth, Grid, Unknown
from looplab.recurrence.halting import HazardGate, LookaheadGate, NoHalt, QHead
from looplab.recurrence.injection import Add, Concat, Diagonal, Gated, NoInjection, Orthogonal
from looplab.recurrence.injection.add import LearnedScalar
from looplab.recurrence.injection.base import Every, FirstOnly, SkipFirst
from looplab.recurrence.kv import Single
from looplab.recurrence.plan import Blocks, LayerLoop, ModelLoop, TwoLevel
from looplab.recurrence.signal import AdaLN, NoSignal, PerIterationLoRA, StepEmbedding
from looplab.recurrence.spec import ClampLast, Cycle
from looplab.recurrence.state_init import FixedBuffer, FromEmbeds, Normal, Unit, Zeros
from looplab.recurrence.state_init import Learned as LearnedStart
from looplab.recurrence.update import Damped, EnergyGate, Replace, Selective

ATTENTION = Attention(heads=2, kv_heads=2, head_dim=4, position=Rope(base=100.0))
BASE = LoopedConfig(
    dim=8,
    vocab=13,
    attention=ATTENTION,
    ffn=SwiGLU(hidden=12),
    order=ModelLoop(num_steps=2),
    blocks=(1,),
    envelope=Envelope(prelude=1, coda=1),
    injection=Add(),
    trained_depth=FixedDepth(num_steps=2),
    init=Init(std=0.3),
)


def attention(**changes):
    return {"attention": dataclasses.replace(ATTENTION, **changes)}


def wide(injection):
    """A state wider than the stream."""
    return {"state_dim": 12, "projection": True, "injection": injection, "state_init": Normal(std=0.5)}


INJECTIONS = {
    "add": Add,
    "learned-scalar": lambda **o: Add(weight=LearnedScalar(init=0.5, skip_first=False), **o),
    "learned-scalar-plain": lambda **o: Add(weight=LearnedScalar(init=0.5, norm=False, skip_first=False), **o),
    "concat-embeds-first": lambda **o: Concat(order="embeds_first", init="identity", **o),
    "concat-state-first": lambda **o: Concat(order="state_first", init="normal", bias=True, **o),
    "diagonal": lambda **o: Diagonal(initial_decay=0.5, **o),
    "orthogonal": lambda **o: Orthogonal(initial_decay=0.5, **o),
    "gated": Gated,
}
WHEN = {"every": Every(), "first": FirstOnly(), "not-first": SkipFirst()}
TWO_BLOCKS = {"order": Blocks(num_steps=(1, 2)), "blocks": (1, 2)}

CHOICES = {
    "envelope-none": {"envelope": NoEnvelope(), "injection": NoInjection()},
    "envelope-prelude-only": {"envelope": Envelope(prelude=2, coda=0)},
    "envelope-coda-only": {"envelope": Envelope(prelude=0, coda=2)},
    "order-model-loop": {},
    "order-layer-loop": {"order": LayerLoop(num_steps=2), "blocks": (2,)},
    "order-blocks": TWO_BLOCKS,
    "order-two-level": {"order": TwoLevel(h=2, l=2), "blocks": (2,), "state_init": Zeros()},
    "order-two-level-split": {"order": TwoLevel(h=2, l=1, share=False), "blocks": (2,), "state_init": Zeros()},
    "order-two-level-repeats": {"order": TwoLevel(h=1, l=2, repeats=2), "state_init": Normal(std=1.0)},
    "injection-none": {"injection": NoInjection()},
    **{
        f"injection-{name}-{when}-{source}": {"injection": make(when=WHEN[when], source=source)}
        for name, make in INJECTIONS.items()
        for when in WHEN
        for source in ("prelude", "embeds")
    },
    "injection-skip-first": {"injection": Add(weight=LearnedScalar(init=0.5))},
    "injection-per-block": {**TWO_BLOCKS, "injection": Gated(shared_over_blocks=False)},
    "state-from-embeds": {"state_init": FromEmbeds()},
    "state-zeros": {"state_init": Zeros()},
    "state-normal": {"state_init": Normal(std=0.5)},
    "state-like-init": {"state_init": Normal(std="like_init", cut=2.0)},
    "state-uncut": {"state_init": Normal(std=0.5, cut=None)},
    "state-unit": {"state_init": Unit()},
    "state-no-noise": {"state_init": Normal(std=0.0)},
    "state-learned": {"state_init": LearnedStart()},
    "state-fixed-buffer": {"state_init": FixedBuffer()},
    "boundary-none": {"boundary": NoBoundary()},
    "boundary-shared": {"boundary": SharedFinalNorm(), "envelope": Envelope(prelude=1, coda=0)},
    "boundary-own": {"boundary": OwnNorm()},
    "boundary-plain": {"boundary": PlainRMS()},
    "boundary-end": {"boundary": EndNorm(c=2.0)},
    "boundary-end-learned": {"boundary": EndNorm(learned_scale=True)},
    "exit-own": {"exit_norm": "own"},
    "exit-final": {"exit_norm": "final"},
    "placement-pre": {"placement": PreNorm()},
    "placement-sandwich": {"placement": SandwichSum()},
    "placement-pre-and-branch": {"placement": PreAndBranch()},
    "placement-branch-only": {"placement": BranchOnly()},
    "placement-post-sum": {"placement": PostSum()},
    "residual-unit": {"residual": UnitResidual()},
    "residual-loom": {"residual": LoomResidual()},
    "norm-rms-plain": {"norm": RMSNorm(affine=False)},
    "norm-layer": {"norm": LayerNorm()},
    "norm-layer-plain": {"norm": LayerNorm(affine=False)},
    "signal-none": {"signal": NoSignal()},
    "signal-embedding": {"signal": StepEmbedding(max=2)},
    "signal-embedding-blocks": {**TWO_BLOCKS, "signal": StepEmbedding(max=2)},
    "signal-embedding-clamp": {"signal": StepEmbedding(max=2), "beyond": ClampLast()},
    "signal-embedding-cycle": {"signal": StepEmbedding(max=2), "beyond": Cycle()},
    "signal-adaln": {"signal": AdaLN(freq_dim=6)},
    "signal-adaln-grid": {"signal": AdaLN(freq_dim=6), "trained_depth": Grid(sizes=(0.6, 0.4))},
    "signal-lora": {"signal": PerIterationLoRA(rank=2, targets=("q", "v", "down"), max=2)},
    "signal-lora-layers": {
        "order": LayerLoop(num_steps=2),
        "blocks": (2,),
        "signal": PerIterationLoRA(rank=1, targets=("k", "o", "gate", "up"), max=2),
    },
    "halt-none": {"halt": NoHalt()},
    "halt-hazard": {"halt": HazardGate(bias=-1.0)},
    "halt-lookahead": {"halt": LookaheadGate()},
    "halt-q": {"halt": QHead()},
    "halt-hazard-wide": {**wide(Diagonal(initial_decay=0.5)), "halt": HazardGate()},
    "final-norm-own-kind": {"norm": RMSNorm(affine=False), "final_norm": RMSNorm()},
    "update-replace": {"update": Replace()},
    "update-energy": {"update": EnergyGate(hidden=5)},
    "update-selective": {"update": Selective()},
    "update-damped": {"update": Damped(alpha=0.7)},
    "ffn-relu-squared": {"ffn": ReluSquared(hidden=12, scale=0.5)},
    "ffn-gelu": {"ffn": Gelu(hidden=12)},
    "ffn-silu": {"ffn": Silu(hidden=12)},
    "ffn-geglu": {"ffn": GeGLU(hidden=12)},
    "ffn-gated-relu-squared": {"ffn": GatedReluSquared(hidden=12, scale=0.5)},
    "core-ffn": {"core_ffn": Gelu(hidden=10)},
    "core-attention": {"core_attention": dataclasses.replace(ATTENTION, heads=4)},
    "position-some-layers-unrotated": {"unrotated_layers": (1,)},
    "position-interleaved": attention(position=Rope(base=100.0, pairing="interleaved")),
    "position-after-norm": attention(
        position=Rope(base=100.0, order="after_norm"), qk_norm=RMS(affine=True, over="head", eps=1e-6)
    ),
    "position-before-norm": attention(
        position=Rope(base=100.0, order="before_norm"), qk_norm=RMS(affine=True, over="head", eps=1e-6)
    ),
    "position-llama3": attention(
        position=Rope(
            base=100.0,
            scaling=Llama3(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16),
        )
    ),
    "position-none": attention(position=NoPE()),
    "position-alibi": attention(position=ALiBi()),
    "position-learned": attention(position=Learned(max=8)),
    "position-relative": attention(position=RelativeBias(max=4)),
    "position-falling": attention(position=FallingBias(max=2)),
    "attention-grouped": attention(kv_heads=1),
    "attention-norm-full": attention(qk_norm=RMS(affine=False, over="full", eps=1e-6)),
    "attention-qk-bias": attention(qk_bias=True),
    "attention-qkv-bias": attention(qkv_bias=True),
    "attention-window": attention(window=2),
    "attention-gate": attention(output_gate=True),
    "attention-values": attention(value_embedding=True, kv_heads=1),
    "attention-values-somewhere": {
        **attention(value_embedding=True, kv_heads=1),
        "value_tables": (0, 2),
        "value_gates": (0, 2),
    },
    "attention-softcap": attention(softcap=2.0, kv_heads=1),
    "attention-both-ways": attention(causal=False),
    "embed-scale": {"embed_scale": 3.0},
    "embed-norm": {"embed_norm": RMSNorm()},
    "embed-norm-layer": {"embed_norm": LayerNorm()},
    "prelude-norm": {"prelude_norm": RMSNorm()},
    "projection": {"projection": True},
    "state-wider-concat": wide(Concat(order="state_first", init="normal")),
    "state-wider-diagonal": wide(Diagonal(initial_decay=0.5)),
    "state-wider-orthogonal": wide(Orthogonal(initial_decay=0.5)),
    "state-wider-core": {
        **wide(Diagonal(initial_decay=0.5)),
        "core_attention": dataclasses.replace(ATTENTION, heads=3, kv_heads=3),
        "core_ffn": ReluSquared(hidden=16),
    },
    "state-narrower": {**wide(Diagonal(initial_decay=0.5)), "state_dim": 6, "exit_norm": "own"},
    "head-untied": {"head": Head(tied=False)},
    "head-outputs": {"head": Head(tied=False, outputs=5)},
    "head-cells": {"head": Head(tied=False, outputs=6, cells=2)},
    "head-softcap": {"head": Head(tied=True, softcap=3.0)},
    "head-scale": {"head": Head(tied=True, logit_scale=0.25)},
    "head-bias": {"head": Head(tied=True, bias=True)},
    "padded-vocab": {"padded_vocab": 16},
    "max-positions": {"max_positions": 6},
    "kv-single": {"kv_rule": Single()},
    "depth-unknown": {"trained_depth": Unknown()},
    "init-truncated": {"init": Init(std=0.3, out_std=0.1, cut=3.0)},
}


def config(name):
    """The configuration of one choice."""
    return dataclasses.replace(BASE, **CHOICES[name])
