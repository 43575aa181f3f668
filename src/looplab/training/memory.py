"""How much memory a training step needs, before it runs.

    peak   = weights + optimizer state + the largest of
               gradients of earlier micro-batches + saved + logits          while the loss is differentiated
               gradients so far + prelude + boundaries + core + unit        in the backward pass of the loop
               gradients + prelude + ends                                   in that of the prelude
               gradients + update                                           in the optimizer
    saved  = prelude + g * (S + A) + coda + head       every application of the window keeps its state S and interior A
    saved  = prelude + g * S + A + coda + head         CheckpointApplication: the states, and one interior at a time
    saved  = prelude + L * S + R * A + (R - 1) * S + coda + head      CheckpointUnit: L stored layers that run R times

What autograd keeps is read off the model's own code: it is built and run on fake tensors, which have shapes and types
but no storage, and every storage that the graph holds counts once. An application is run once for every kind of place
in the plan (after the cut, after itself, after another block) and multiplied. So nothing about a family is written down
here, no memory is touched, and a model of any size takes seconds at most. What a backward pass holds beyond what was
saved is counted the same way, operation by operation (`live_bytes`), once for every kind of application.

`peak` is within 5 % of what torch's allocator gives out in a real step, at every window and checkpoint mode. The
resident size of a process is not: the C library keeps what was freed, and libraries have scratch of their own.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from looplab._registry import did_you_mean
from looplab.data.packing import PackedText
from looplab.models.base import LoopedLM, build
from looplab.objectives.next_token import NextToken
from looplab.objectives.readout import summed_readout
from looplab.recurrence import state as states
from looplab.recurrence.gradient import FullBPTT, GradientStrategy
from looplab.recurrence.plan import Application, Plan, Steps
from looplab.training.config import RunConfig
from looplab.training.live_bytes import LiveBytes
from looplab.training.step import Precision, autocast, depth_plan

OPTIMIZER_TENSORS = {"adamw": 2, "sgd": 0}
"""Tensors of the size of a parameter that an optimizer keeps."""
COUNTER = 4
"""Bytes of the step counter that AdamW keeps per parameter tensor."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one training step."""

    weights: int
    gradients: int
    optimizer: int
    prelude: int
    """What `encode` and the start of the loop save, and what applications keep of the context."""
    core: int
    """Interiors of applications: all of the window, or with recomputation the largest unit alone."""
    boundaries: int
    """States that recomputation starts from; 0 without it."""
    coda: int
    head: int
    """What the readout saves; with chunks, only what they are made again from."""
    logits: int
    """What coda, head and loss hold while they are differentiated, beyond what `coda` and `head` count."""
    unit: int
    """What the backward pass of an application holds beyond what it saved, with the gradients of the loop."""
    ends: int
    """What the backward pass of the prelude holds beyond `prelude` and gradients that stay."""
    update: int
    """What the optimizer holds while it changes one parameter."""
    earlier: int
    """Gradients that are there when a micro-batch begins: 0 for the first."""
    late: int
    """Gradients that come after those of the readout: the loop's, which `unit` counts, and the prelude's."""

    @property
    def saved(self) -> int:
        """Activations."""
        return self.prelude + self.core + self.boundaries + self.coda + self.head

    @property
    def peak(self) -> int:
        """Most bytes alive at once."""
        recomputed = self.core if self.boundaries else 0
        return (
            self.weights
            + self.optimizer
            + max(
                self.earlier + self.saved - recomputed + self.logits,
                max(self.gradients - self.late, self.earlier) + self.prelude + self.boundaries + self.core + self.unit,
                self.gradients + self.prelude + self.ends,
                self.gradients + self.update,
            )
        )

    def line(self) -> str:
        """One line: `memory 1.2 GB: weights 0.3 GB, gradients ..`; the parts are not all alive at once."""
        parts = {name: getattr(self, name) for name in ("weights", "gradients", "optimizer")}
        parts |= {"activations": self.saved, "logits": self.logits}
        return f"memory {size(self.peak)}: " + ", ".join(f"{name} {size(n)}" for name, n in parts.items())

    def __str__(self) -> str:
        rows = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)] + [("peak", self.peak)]
        return "\n".join(f"{name:<12}{size(n):>10}{n:>20,}" for name, n in rows)


def estimate(
    model: Any,
    *,
    rows: int,
    tokens: int,
    num_steps: Steps | None = None,
    plan: Plan | None = None,
    gradient: GradientStrategy | None = None,
    optimizer: str = "adamw",
    dtype: torch.dtype | None = None,
    precision: Precision = "fp32",
    chunk: int | None = None,
    extras: Mapping[str, Tensor] | None = None,
    accumulates: bool = False,
) -> MemoryEstimate:
    """The bytes of one training step with next-token loss at the end of the plan, on the CPU.

    Args:
        model: A model of a registered class, on any device, or its configuration. Frozen parameters of a model need
            neither gradient nor optimizer state.
        rows: Rows of one micro-batch.
        tokens: Tokens per row.
        num_steps: Iterations (default: the model's); or `plan`.
        gradient: Where the graph is cut and what is recomputed (default: `FullBPTT()`).
        optimizer: "adamw" or "sgd" (without momentum).
        dtype: Type of weights, gradients and optimizer state; default: the model's, float32 for a configuration.
        precision: "bf16": autocast, as in training.
        chunk: Tokens per readout chunk (`NextToken.chunk`).
        extras: As for `encode`, any values of the right shape.
        accumulates: Gradients of an earlier micro-batch are there.
    Raises:
        ValueError: A number below 1, both `num_steps` and `plan`, a depth that the model does not have.
        KeyError: An unknown optimizer; a model of a class that is not registered.
    """
    for name, number in (("rows", rows), ("tokens", tokens), ("chunk", 1 if chunk is None else chunk)):
        if number < 1:
            raise ValueError(f"estimate: {name} must be at least 1. Got {number}. Give the shape of a micro-batch.")
    if plan is not None and num_steps is not None:
        raise ValueError("estimate: give num_steps or plan, not both.")
    if optimizer not in OPTIMIZER_TENSORS:
        hint, known = did_you_mean(optimizer, OPTIMIZER_TENSORS), ", ".join(OPTIMIZER_TENSORS)
        raise KeyError(f"Unknown optimizer {optimizer!r}.{hint} Known: {known}.")
    given = {name: tuple(tensor.shape) for name, tensor in (extras or {}).items()}
    fake = _fake(model, dtype)
    with FakeTensorMode():
        _without_storage(fake)
        step = _Step(fake, rows, tokens, gradient or FullBPTT(), accumulates)
        with autocast(precision, "cpu"):
            parts = step.parts(fake.spec.plan(num_steps) if plan is None else plan, given, chunk)
    trained = [p for p in fake.parameters() if p.requires_grad]
    return MemoryEstimate(
        weights=sum(t.nbytes for t in (*fake.parameters(), *fake.buffers())),
        **trained_bytes(trained, optimizer, accumulates=accumulates),
        **parts,
    )


def trained_bytes(trained: Sequence[Tensor], optimizer: str, *, accumulates: bool = False) -> dict[str, int]:
    """The fields of a MemoryEstimate that are due to trained parameters, in the optimizer's order."""
    gradients, kept = sum(p.nbytes for p in trained), OPTIMIZER_TENSORS[optimizer]
    sizes = [0, *(p.nbytes for p in trained if p.dim() > 1)]
    # AdamW: a root and its quotient, and the quotient of the parameter before.
    update = max((before + 2 * own for before, own in itertools.pairwise(sizes)), default=0)
    return {
        "gradients": gradients,
        "optimizer": kept * gradients + (COUNTER * len(trained) if kept else 0),
        "update": update if kept else 0,
        "earlier": gradients if accumulates else 0,
    }


def memory_line(config: RunConfig, model: LoopedLM) -> str:
    """What a step of a run needs at the deepest draw, in one line; what other objectives add is not in it."""
    data, law = config.data, model.spec.trained_depth
    deepest = max(law.support())  # type: ignore[attr-defined]
    rows, tokens = data.rows // config.micro_batches, data.seq_len
    masked = isinstance(data, PackedText) and data.packing.document_mask
    found = estimate(
        model,
        rows=rows,
        tokens=tokens,
        plan=depth_plan(model.spec, deepest),
        gradient=config.gradient,
        precision=config.precision,
        chunk=getattr(config.objective, "chunk", None),
        extras={"document_ids": torch.zeros(rows, tokens, dtype=torch.long)} if masked else None,
        accumulates=config.micro_batches > 1,
    )
    read = "" if isinstance(config.objective, NextToken) else ", with one readout at the end"
    return f"{found.line()} (at most: T {deepest}, {rows} rows of {tokens} tokens{read})"


def size(count: int) -> str:
    """`1.2 GB`, in powers of 1000."""
    number, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 999.5:
            break
        number, unit = number / 1000, larger
    return f"{number:.0f} {unit}" if number >= 99.5 or unit == "B" else f"{number:.3g} {unit}"


class _Held:
    """Storages that autograd keeps, each once; those in `known` count 0."""

    def __init__(self, known: Sequence[Any]):
        self.storages = {storage._cdata: storage for storage in known}  # held, so that no address is used again

    def add(self, tensors: Sequence[Tensor]) -> int:
        """Bytes of the storages that were not there before."""
        fresh = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        fresh = {key: storage for key, storage in fresh.items() if key not in self.storages}
        self.storages |= fresh
        return sum(storage.nbytes() for storage in fresh.values())

    def copy(self) -> "_Held":
        """The same storages, to be added to on its own."""
        return _Held(list(self.storages.values()))


class _Saving:
    """Inside it, `bytes` counts what autograd saves that `held` did not have, and `context` what is the context's."""

    def __init__(self, held: _Held, context: Any = None):
        self.held, self.bytes, self.context = held, 0, 0
        self._of_context = (
            {t.untyped_storage()._cdata for t in states.leaves(context)} if context is not None else set()
        )
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata in self._of_context:
            self.context += self.held.add([tensor])
        else:
            self.bytes += self.held.add([tensor])
        return tensor

    def __enter__(self) -> "_Saving":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


class _Step:
    """One step of a fake model, part by part."""

    def __init__(self, model: LoopedLM, rows: int, tokens: int, strategy: GradientStrategy, accumulates: bool):
        self.model, self.rows, self.tokens, self.strategy = model, rows, tokens, strategy
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.held = _Held([t.untyped_storage() for t in (*model.parameters(), *model.buffers())])
        self.prelude = 0
        self.sizes: dict[Any, int] = {}
        if accumulates:
            for parameter in self.trained:
                parameter.grad = torch.empty_like(parameter)

    def parts(self, plan: Plan, extras: Mapping[str, tuple[int, ...]], chunk: int | None) -> dict[str, int]:
        """Saved bytes by part of the step."""
        model, (rows, tokens) = self.model, (self.rows, self.tokens)
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        width = model.spec.noise_width
        given = {name: ids.new_zeros(shape) for name, shape in extras.items()} or None
        noise = torch.zeros(rows, tokens, width) if width else None

        def encode() -> tuple[Any, Any]:
            context = model.encode(ids, extras=given)
            return context, model.init_state(context, noise)

        with _Saving(self.held) as before:
            context, state = encode()
        self.prelude = before.bytes
        state, core, boundaries = self.loop(plan, state, context)
        with _Saving(self.held, context) as coda:
            hidden = model.coda(state, context)
        with _Saving(self.held) as head:
            summed_readout(model, hidden, ids, _cross_entropy, chunk=chunk)
        # In the order of the backward pass, so that every piece finds the gradients of those before it.
        logits = self.beyond(
            lambda state, context: summed_readout(model, model.coda(state, context), ids, _cross_entropy, chunk=chunk),
            state,
            context,
        )
        late = self.missing()
        unit = self.unit(plan, state, context)
        last = self.missing()
        return {
            "prelude": self.prelude + coda.context,
            "core": core,
            "boundaries": boundaries,
            "coda": coda.bytes,
            "head": head.bytes,
            "logits": logits,
            "unit": unit,
            "ends": max(0, self.beyond(encode) - last),
            "late": late,
        }

    def beyond(self, piece: Callable[..., Any], *given: Any) -> int:
        """Most bytes that a piece of the step holds, forward and backward, beyond what it saves.

        Args:
            piece: (*given) -> tensors, or states and contexts.
            given: States and contexts, which are there before.
        """
        fresh = [states.map(lambda t: torch.empty_like(t, requires_grad=t.requires_grad), value) for value in given]
        known = [*self.model.parameters(), *self.model.buffers(), *states.leaves(tuple(fresh))]
        known += [p.grad for p in self.trained if p.grad is not None]
        with LiveBytes(known) as live, torch.enable_grad():
            with _Saving(_Held([t.untyped_storage() for t in known])) as saving:
                made = [leaf for leaf in states.leaves(tuple(piece(*fresh))) if leaf.requires_grad]
            gradients = [torch.empty_like(leaf) for leaf in made]
            ends = [torch.autograd.graph.get_gradient_edge(leaf) for leaf in made]
            saving.held = _Held([])  # it goes as soon as the graph lets it go
            del made
            if ends:  # a frozen prelude has none
                with torch.autocast("cpu", enabled=False):
                    torch.autograd.backward(ends, gradients)
        return live.most - saving.bytes

    def unit(self, plan: Plan, state: Any, context: Any) -> int:
        """Most of `beyond` for the kinds of application in the window, last first, and gradients they made before."""
        kinds: dict[Any, list[Application]] = {}
        for segment in reversed(self.strategy.segments(len(plan))):
            for application in reversed(plan[segment.start : segment.stop].applications) if segment.gradient else ():
                block, iteration = application
                kinds.setdefault((block, self.model.spec.operator_class(block, iteration)), []).append(application)
        largest, before = 0, self.missing()
        for applications in kinds.values():
            for application in applications[:2]:  # the first makes the gradients that others find
                made = before - self.missing()
                found = self.beyond(lambda s, c, a=application: (self.apply(s, c, a),), state, context)
                largest = max(largest, made + found)
        return largest

    def missing(self) -> int:
        """Bytes of the gradients that are not there yet."""
        return sum(p.nbytes for p in self.trained if p.grad is None)

    def loop(self, plan: Plan, state: Any, context: Any) -> tuple[Any, int, int]:
        """A state as after the plan, bytes of interiors and bytes of boundaries."""
        interiors, boundaries, recomputes = [0], 0, self.strategy.recomputes
        previous: Any = None
        for segment in self.strategy.segments(len(plan)):
            if not segment.gradient:
                with torch.no_grad():  # for the types of a state that an application made
                    state = self.apply(state, context, plan[segment.stop - 1])
                for block in plan[segment.start : segment.stop].iterations():
                    state = self.renewed(state, block, gradient=False)
                continue
            state = states.detach(state) if segment.start else state
            previous = None
            for unit in self.strategy.units(plan[segment.start : segment.stop].applications):
                held = self.held
                if recomputes:
                    boundaries += held.add(states.leaves(state))
                    self.prelude += held.add(states.leaves(context))
                    held = held.copy()
                interior = 0
                for application in unit:
                    state, kept = self.application(state, context, application, previous, held)
                    interior, previous = interior + kept, application.block
                interiors.append(interior)
        return state, max(interiors) if recomputes else sum(interiors), boundaries

    def application(
        self, state: Any, context: Any, application: Application, previous: int | None, held: _Held
    ) -> tuple[Any, int]:
        """A state as after an application, and what it saves; run only if nothing of its kind was."""
        block, iteration = application
        grows = tuple(leaf.requires_grad for leaf in states.leaves(state))
        kind = (previous, block, self.model.spec.operator_class(block, iteration), grows)
        if kind in self.sizes:
            return self.renewed(state, block, gradient=True), self.sizes[kind]
        with _Saving(held, context) as saving:
            state = self.apply(state, context, application)
        self.prelude += saving.context
        self.sizes[kind] = saving.bytes
        return state, saving.bytes

    def apply(self, state: Any, context: Any, application: Application) -> Any:
        index = torch.full((self.rows,), application.iteration, dtype=torch.long)
        return self.model.step(state, context, application.block, index)

    def renewed(self, state: Any, block: int, *, gradient: bool) -> Any:
        """The state with storage of its own in the fields that a block writes."""
        if isinstance(state, Tensor):
            return torch.empty_like(state, requires_grad=gradient)
        fields = self.model.spec.blocks[block].writes
        return state._replace(**{n: torch.empty_like(getattr(state, n), requires_grad=gradient) for n in fields})


def _fake(model: Any, dtype: torch.dtype | None) -> LoopedLM:
    """A model on the meta device, whose tensors are to be made fake."""
    real = model if isinstance(model, nn.Module) else None
    if dtype is None:
        dtype = torch.float32 if real is None else next(real.parameters()).dtype
    fake = build(model if real is None else real.config, dtype=dtype, device="meta")
    if real is not None:
        for name, parameter in real.named_parameters():
            fake.get_parameter(name).requires_grad_(parameter.requires_grad)
    return fake


def _without_storage(model: nn.Module) -> None:
    """Puts fake tensors of the CPU, of the fake mode that is active, in the place of all parameters and buffers."""
    made: dict[int, Tensor] = {}  # a tensor may stand in several places
    for module in model.modules():
        for places in (module._parameters, module._buffers):
            for name, old in places.items():
                if old is not None:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    wrapped = nn.Parameter(new, old.requires_grad) if places is module._parameters else new
                    places[name] = made.setdefault(id(old), wrapped)  # type: ignore[assignment]


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return (torch.nn.functional.cross_entropy(logits, labels, reduction="sum"),)
