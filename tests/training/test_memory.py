"""The estimate against what autograd really holds: the same step on real tensors, under saved_tensors_hooks."""

import dataclasses
import io
import re

import pytest
import torch
from torch import nn

from contract.zoo import NAMES, encode, noise, tiny, tokens
from looplab.data.packing import Batch, Packing, Position
from looplab.models.base import PRESETS, build
from looplab.models.looped import Envelope, LoopedConfig, NoEnvelope
from looplab.nn.attention import Attention
from looplab.nn.mlp import Gelu, ReluSquared, SwiGLU
from looplab.nn.rope import Rope
from looplab.objectives import NextToken
from looplab.objectives.readout import summed_readout
from looplab.recurrence import state as states
from looplab.recurrence.boundary import SharedFinalNorm
from looplab.recurrence.depth import FixedDepth, Unknown
from looplab.recurrence.gradient import CheckpointApplication, CheckpointUnit, FullBPTT, TruncatedBPTT
from looplab.recurrence.injection import Add, Concat
from looplab.recurrence.loop import run_plan
from looplab.recurrence.plan import LayerLoop, ModelLoop, Plan
from looplab.recurrence.state_init import Normal
from looplab.training.display import Lines
from looplab.training.memory import MemoryEstimate, estimate, memory_line, size
from looplab.training.step import TrainingStep, autocast
from looplab.training.trainer import train
from training.allocator import allocated
from training.tiny_run import core, tiny_run, with_data

ROWS, TOKENS = 2, 24
LIMIT = 0.02
"""Largest relative error of saved bytes that the specification allows."""
EVERY_CUT = [
    FullBPTT(),
    TruncatedBPTT(window=1),
    TruncatedBPTT(window=3),
    CheckpointApplication(),
    CheckpointApplication(inner=TruncatedBPTT(window=3)),
    CheckpointUnit(),
    CheckpointUnit(inner=TruncatedBPTT(window=3)),
]


def cross_entropy(logits, labels):
    return (nn.functional.cross_entropy(logits, labels, reduction="sum"),)


class Held:
    """Bytes of unique storages that autograd saves inside it, parameters and what `known` holds left out."""

    def __init__(self, model, known=()):
        self.storages = {}
        self.known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *known)}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage
        return tensor

    def __enter__(self):
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    @property
    def bytes(self):
        return sum(storage.nbytes() for storage in self.storages.values())


def held_bytes(model, plan, gradient, *, chunk=None, precision="fp32"):
    """What a real step holds before its backward pass."""
    ids = tokens(model, ROWS, TOKENS)
    drawn = noise(model, torch.arange(ids.shape[1]).expand(ids.shape), dtype=next(model.parameters()).dtype)
    with Held(model) as held, autocast(precision, "cpu"):
        context = encode(model, ids)
        state = run_plan(model, plan, context, model.init_state(context, drawn), gradient=gradient)
        losses = summed_readout(model, model.coda(state, context), ids, cross_entropy, chunk=chunk)
    found = held.bytes
    del losses
    return found


def recomputed_bytes(model, plan, gradient):
    """What the largest unit of a plan holds when it runs again."""
    ids = tokens(model, ROWS, TOKENS)
    context = states.map(lambda t: t.detach().clone(), encode(model, ids))
    drawn = noise(model, context.positions, dtype=torch.float32)
    state = model.init_state(context, drawn)
    largest = 0
    for segment in gradient.segments(len(plan)):
        for unit in gradient.units(plan[segment.start : segment.stop].applications):
            state = states.map(lambda t: t.detach().clone().requires_grad_(), state)
            with Held(model, [*states.leaves(context), *states.leaves(state)]) as held:
                state = run_plan(model, Plan.of(unit), context, state)
            largest = max(largest, held.bytes if segment.gradient else 0)
    return largest


def of(model, plan, gradient, **options):
    ids = tokens(model, ROWS, TOKENS)
    extras = {"puzzle_ids": torch.zeros(ROWS, dtype=torch.long)} if model.spec.extras.get("puzzle_ids") else None
    return estimate(model, rows=ROWS, tokens=ids.shape[1], plan=plan, gradient=gradient, extras=extras, **options)


def config(**changes):
    fields = {
        "dim": 32,
        "vocab": 50,
        "attention": Attention(heads=4, kv_heads=4, head_dim=8, position=Rope(base=10000.0)),
        "ffn": SwiGLU(hidden=48),
        "order": ModelLoop(num_steps=5),
        "blocks": (2,),
        "trained_depth": FixedDepth(num_steps=5),
    }
    return LoopedConfig(**{**fields, **changes})


SHAPES = {
    "huginn": config(
        envelope=Envelope(prelude=2, coda=1),
        injection=Concat(order="state_first", init="normal"),
        state_init=Normal(std="like_init"),
        exit_norm="final",
    ),
    "ouro": config(envelope=NoEnvelope(), boundary=SharedFinalNorm()),
    "two levels": PRESETS["tiny-two-level"](),
    "grouped gelu": config(
        ffn=Gelu(hidden=96), attention=Attention(heads=4, kv_heads=2, head_dim=8, position=Rope(base=1e4))
    ),
    "squared relu": config(ffn=ReluSquared(hidden=40), max_positions=TOKENS),
    "layer loop": config(order=LayerLoop(num_steps=3), blocks=(3,), trained_depth=Unknown()),
    "windowed": config(attention=Attention(heads=4, kv_heads=4, head_dim=8, position=Rope(base=1e4), window=4)),
}


CASES = [("huginn", cut) for cut in EVERY_CUT] + [
    (name, cut) for name in SHAPES if name != "huginn" for cut in (EVERY_CUT[2], EVERY_CUT[5])
]


@pytest.mark.parametrize(("name", "gradient"), CASES, ids=str)
def test_saved_bytes_are_those_of_a_real_step_at_every_window_and_checkpoint(name, gradient):
    model = build(SHAPES[name])
    plan = model.spec.plan()
    expected = of(model, plan, gradient)
    real = held_bytes(model, plan, gradient)
    if not gradient.recomputes:
        assert expected.boundaries == 0
        assert real == pytest.approx(expected.saved, rel=LIMIT)
        return
    assert real == pytest.approx(expected.saved - expected.core, rel=LIMIT)
    assert recomputed_bytes(model, plan, gradient) == pytest.approx(expected.core, rel=LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_saved_bytes_of_every_registered_model_are_exact(name):
    model = tiny(name, dtype=torch.float32)
    plan, gradient = model.spec.plan(), CheckpointApplication(inner=TruncatedBPTT(window=2))
    expected = of(model, plan, gradient)
    assert held_bytes(model, plan, gradient) == expected.saved - expected.core


def test_the_formula_of_recomputation():
    """g * S for every application, L * S for every stored layer, and never a byte for what runs before the window."""
    state = ROWS * TOKENS * 32 * 4
    model = build(SHAPES["huginn"])
    interior = of(model, model.spec.plan(1), CheckpointApplication()).core
    for steps, window in ((2, 1), (9, 3)):
        inner = TruncatedBPTT(window=window)
        found = of(model, model.spec.plan(steps), CheckpointApplication(inner=inner))
        assert (found.boundaries, found.core) == (window * state, pytest.approx(interior, rel=LIMIT))
        one = of(model, model.spec.plan(steps), TruncatedBPTT(window=1)).core
        assert of(model, model.spec.plan(steps), inner).core == pytest.approx(window * one, rel=LIMIT)
    model = build(SHAPES["layer loop"])
    once = of(model, model.spec.plan(1), CheckpointApplication())
    often = of(model, model.spec.plan(4), CheckpointUnit())
    assert often.boundaries == once.boundaries == 3 * state
    assert often.core == 4 * once.core + 3 * state  # inside a unit the states between its applications are held too


@pytest.mark.parametrize(
    ("options", "real"),
    [
        ({"chunk": 10}, {"chunk": 10}),
        ({"precision": "bf16"}, {"precision": "bf16"}),
        ({"dtype": torch.float64}, {}),
    ],
    ids=["chunks", "autocast", "float64"],
)
def test_chunks_autocast_and_other_types_are_exact_too(options, real):
    model = build(SHAPES["ouro"], dtype=options.get("dtype", torch.float32))
    gradient = TruncatedBPTT(window=2)
    assert of(model, model.spec.plan(), gradient, **options).saved == held_bytes(
        model, model.spec.plan(), gradient, **real
    )


def test_document_masks_are_counted():
    model, ids = build(SHAPES["ouro"]), torch.zeros(ROWS, TOKENS, dtype=torch.long)
    extras = {"document_ids": ids}
    with Held(model) as held:
        context = model.encode(ids, extras=extras)
        end = run_plan(model, model.spec.plan(2), context, model.init_state(context, None))
        summed_readout(model, model.coda(end, context), ids, cross_entropy, chunk=None)
    masked = estimate(model, rows=ROWS, tokens=TOKENS, num_steps=2, extras=extras)
    assert masked.saved == held.bytes
    assert masked.saved > estimate(model, rows=ROWS, tokens=TOKENS, num_steps=2).saved


def test_weights_gradients_and_optimizer_state_are_those_of_torch():
    model = tiny("tiny-core", dtype=torch.float32)
    model.embedding.weight.requires_grad_(False)
    sizes = [p.nbytes for p in model.parameters() if p.requires_grad]
    expected = {"rows": 1, "tokens": 4}
    for name, optimizer in (
        ("adamw", torch.optim.AdamW(model.parameters())),
        ("sgd", torch.optim.SGD(model.parameters())),
    ):
        context = model.encode(torch.zeros(1, 4, dtype=torch.long))
        run_plan(model, model.spec.plan(), context, model.init_state(context, torch.zeros(1, 4, 32))).sum().backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        found = estimate(model, optimizer=name, **expected)
        assert found.weights == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        assert found.gradients == sum(sizes)
        held = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        assert found.optimizer == sum(v.nbytes for v in held)


def peak(model, plan, gradient, *, rows=ROWS, seq=TOKENS, chunk=None, micro_batches=1):
    """Bytes of one step of training at their most: what is there before, and what torch's allocator gives out."""
    optimizer, ids = torch.optim.AdamW(model.parameters()), tokens(model, rows, seq)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    places = torch.arange(seq).expand(rows, seq).contiguous()
    batch = Batch(
        tokens=ids, labels=ids, positions=places, document_ids=None, rows=torch.arange(rows), start=Position(0, 0, 0),
        data_hash="",
    )  # fmt: skip
    drawn = torch.zeros(rows, seq, model.spec.noise_width) if model.spec.noise_width else None
    training = TrainingStep(model, NextToken(chunk=chunk), gradient)

    def step():
        for _ in range(micro_batches):
            training(batch, plan, drawn, {"ce": rows * seq}).share.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    before = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    return sum(tensor.nbytes for tensor in before) + allocated(step)


PEAK = 0.05
"""Largest relative error of the peak that the specification allows."""
LOOPED = config(vocab=16, injection=Add(source="embeds"), ffn=SwiGLU(hidden=96), envelope=NoEnvelope(), blocks=(1,))
"""So few symbols that with recomputation the peak lies in the backward pass of the loop, not in the loss."""


@pytest.mark.parametrize("recompute", [None, CheckpointApplication, CheckpointUnit])
def test_the_peak_of_a_real_step_is_within_5_percent_at_every_window_and_checkpoint(recompute):
    model = build(LOOPED)
    for steps, window in [(t, w) for t in (4, 8, 16) for w in sorted({1, 2, 4, t})]:
        cut = TruncatedBPTT(window=window)
        gradient, plan = cut if recompute is None else recompute(inner=cut), model.spec.plan(steps)
        expected = estimate(model, rows=ROWS, tokens=64, plan=plan, gradient=gradient)
        found = peak(model, plan, gradient, seq=64)
        assert found == pytest.approx(expected.peak, rel=PEAK), f"T {steps}, window {window}"


def test_a_frozen_prelude_has_no_backward_pass():
    model = build(LOOPED)
    whole = estimate(model, rows=1, tokens=8)
    model.embedding.weight.requires_grad_(False)
    found = estimate(model, rows=1, tokens=8)
    assert found.gradients == whole.gradients - model.embedding.weight.nbytes
    assert found.peak < whole.peak


@pytest.mark.parametrize(
    ("shape", "changes", "options"),
    [
        ("huginn", {"vocab": 1000}, {}),
        ("huginn", {"vocab": 1000}, {"chunk": 16}),
        ("huginn", {"ffn": SwiGLU(hidden=1024)}, {}),
        ("huginn", {}, {"micro_batches": 2}),
        ("layer loop", {}, {}),
        ("two levels", {}, {}),
    ],
    ids=["logits", "chunks", "weights", "micro-batches", "layer loop", "two levels"],
)
def test_the_peak_is_found_wherever_in_the_step_it_lies(shape, changes, options):
    model = build(dataclasses.replace(SHAPES[shape], **changes))
    plan, gradient = model.spec.plan(), CheckpointUnit() if shape == "layer loop" else FullBPTT()
    told = {"chunk": options.get("chunk"), "accumulates": "micro_batches" in options}
    expected = of(model, plan, gradient, **told)
    assert peak(model, plan, gradient, **options) == pytest.approx(expected.peak, rel=PEAK)


def test_a_model_too_large_for_this_machine_is_estimated_without_its_weights():
    large = dataclasses.replace(SHAPES["ouro"], dim=8192, ffn=SwiGLU(hidden=65536), vocab=150_000, blocks=(2,))
    found = estimate(large, rows=16, tokens=4096, gradient=CheckpointApplication(), dtype=torch.bfloat16)
    assert found.weights > 8e9
    assert found.boundaries + found.prelude > 5 * 16 * 4096 * 8192 * 2


def test_it_prints_itself():
    parts = {"prelude": 4, "core": 5_000, "boundaries": 0, "coda": 6, "head": 7_000_000}
    beyond = {"logits": 3, "unit": 4, "ends": 5, "update": 6, "earlier": 0, "late": 1}
    found = MemoryEstimate(weights=1_500_000_000, gradients=1, optimizer=2, **parts, **beyond)
    assert found.saved == 7_005_010
    assert found.peak == 1_507_005_015
    assert str(found).splitlines()[0] == "weights         1.5 GB       1,500,000,000"
    assert str(found).splitlines()[-1] == "peak           1.51 GB       1,507,005,015"
    assert found.line() == (
        "memory 1.51 GB: weights 1.5 GB, gradients 1 B, optimizer 2 B, activations 7.01 MB, logits 3 B"
    )


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (123_456, "123 kB"), (999_999, "1 MB")]
)
def test_sizes_have_three_digits(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "estimate: rows must be at least 1. Got 0. Give the shape of a micro-batch."),
        ({"tokens": 0}, "estimate: tokens must be at least 1. Got 0. Give the shape of a micro-batch."),
        ({"chunk": 0}, "estimate: chunk must be at least 1. Got 0. Give the shape of a micro-batch."),
        ({"num_steps": 2, "plan": Plan.parse("[0.0]")}, "estimate: give num_steps or plan, not both."),
        ({"optimizer": "adam"}, "Unknown optimizer 'adam'. Did you mean 'adamw'? Known: adamw, sgd."),
    ],
)
def test_impossible_questions_are_refused(options, message):
    with pytest.raises((ValueError, KeyError), match=re.escape(message)):
        estimate(SHAPES["ouro"], **{"rows": 1, "tokens": 4, **options})


def test_a_run_says_what_it_needs_before_its_first_step(tmp_path):
    stream = io.StringIO()
    packing = Packing(seq_len=12, rows=4, document_mask=True)
    config = tiny_run(tmp_path, model=core(), objective=NextToken(chunk=5), gradient=CheckpointApplication(), steps=1)
    config = dataclasses.replace(with_data(config, packing=packing), micro_batches=2)
    train(config, tmp_path / "run", display=Lines(1, stream))
    first = stream.getvalue().splitlines()[0]
    found = estimate(
        config.model,
        accumulates=True,
        rows=2,
        tokens=12,
        num_steps=4,
        gradient=CheckpointApplication(),
        chunk=5,
        extras={"document_ids": torch.zeros(2, 12, dtype=torch.long)},
    )
    assert first == f"{found.line()} (at most: T 4, 2 rows of 12 tokens)"


def test_a_prefix_law_is_estimated_at_its_longest_prefix(tmp_path):
    config = tiny_run(tmp_path)  # two blocks of two iterations, U{1..4} applications
    line = memory_line(config, config.build_model())
    assert line.startswith(estimate(config.model, rows=4, tokens=12).line())
    assert "T 4, 4 rows of 12 tokens)" in line
