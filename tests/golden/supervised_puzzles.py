"""What was recorded of TRM and HRM, by our models and `DeepSupervision`: evaluation, and the calls of training.

A batch has fixed slots. Before a call, a slot whose puzzle halted takes the puzzle that was offered to it and starts
over; the others go on from their detached state. Exploration is off, as in what was recorded. Losses were recorded as
sums over slots.
"""

import dataclasses

import torch

from looplab.data.packing import Batch, Position
from looplab.objectives.base import Pass
from looplab.objectives.deep_supervision import (
    HALTED,
    IGNORED,
    LABELS,
    STEPS,
    TOKENS,
    continue_target,
    solved,
)
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.recurrence.loop import run_plan
from looplab.recurrence.trace import Recorder
from tolerances import PUBLISHED_GRADIENTS, PUBLISHED_OUTPUTS

INPUTS = {"inputs", "labels", "puzzle_identifiers", "train_inputs", "train_labels", "train_puzzle_identifiers"}
"""What was recorded of the data; the rest is to be compared."""


def agree(name, found, expected):
    """Integers equal, gradients and everything else within their bounds."""
    if not expected.is_floating_point():
        assert torch.equal(found.to(expected.dtype), expected)
        return
    bound = PUBLISHED_GRADIENTS if "grad" in name else PUBLISHED_OUTPUTS
    torch.testing.assert_close(found.detach(), expected, check_dtype=False, **bound)


def evaluate(model, io):
    """Every supervision step, and the calls inside the first one, by the names of the recording."""
    context = model.encode(io["inputs"].long(), extras={"puzzle_ids": io["puzzle_identifiers"].long()})
    recorder, plan, marks = Recorder(), model.spec.plan(), model.spec.marks()
    with torch.no_grad():
        run_plan(model, plan, context, model.init_state(context, None), recorder=recorder)
        ends = [recorder.states[mark] for mark in marks]
        logits = [model.head(model.coda(end, context)) for end in ends]
        q = torch.stack([model.halt(end) for end in ends])
    inside = zip(plan[: marks[0]], recorder.states[1:], strict=False)
    steps = torch.arange(1, len(marks) + 1, dtype=torch.int32)[:, None].expand(-1, len(io["inputs"]))
    return {
        "input_embeddings": context.slots,
        "eval_inner_trace_row0": torch.stack([(after.high if block else after.low)[0] for (block, _), after in inside]),
        "eval_z_H": torch.stack([end.high for end in ends]),
        "eval_z_L": torch.stack([end.low for end in ends]),
        "eval_logits": torch.stack(logits),
        "eval_q_halt_logits": q[..., 0],
        "eval_q_continue_logits": q[..., 1],
        "eval_steps": steps,
        "eval_halted": (steps >= len(marks)).to(torch.uint8),  # never before the last step
    }


class OwnVectors:
    """The model with a table of one vector per slot, so that every slot's gradient is told apart. Notes what halt says.

    `puzzles` are the numbers of the slots' puzzles.
    """

    def __init__(self, model, puzzles):
        self.model, self.spec, self.said = model, model.spec, []
        self.table = model.puzzles.table[puzzles].clone().requires_grad_()

    def __getattr__(self, name):
        return getattr(self.model, name)

    def encode(self, tokens, positions=None, extras=None):
        kept, self.model.puzzles.table = self.model.puzzles.table, self.table
        context = self.model.encode(tokens, extras={"puzzle_ids": torch.arange(len(tokens))})
        self.model.puzzles.table = kept
        return context

    def halt(self, state):
        self.said.append(self.model.halt(state))
        return self.said[-1]


def train(model, io, *, window, objective, rules):
    """The recorded calls of training, by the names of the recording.

    Args:
        window: Trailing applications of a call that carry gradient.
        rules: Of the key map, to give gradients the names of the original.
    """
    rows, carry, found = io["train_inputs"].shape[1], {}, {}
    puzzles = torch.zeros(rows, dtype=torch.long)
    objective = dataclasses.replace(objective, exploration=0.0)

    def put(name, value):
        found.setdefault(f"train_{name}", []).append(value.detach())

    for call, (inputs, labels, offered) in enumerate(
        zip(*(io[f"train_{name}"].long() for name in ("inputs", "labels", "puzzle_identifiers")), strict=True)
    ):
        free = carry[HALTED] if carry else torch.ones(rows, dtype=torch.bool)
        puzzles = torch.where(free, offered, puzzles)
        seen = OwnVectors(model, puzzles)

        def fetch(difficulty, numbers, inputs=inputs, labels=labels, free=free):
            assert len(numbers) == int(free.sum())
            return _batch(inputs[free], labels[free])

        outcome = objective.run(
            Pass(
                model=seen,
                batch=_batch(inputs, labels),
                plan=model.spec.plan(),
                gradient=TruncatedBPTT(window=window),
                carry=carry,
                fetch=fetch,
            )
        )
        carry, parts = outcome.carry, outcome.parts
        loss = parts.share(dict.fromkeys(parts, 1))
        names, parameters = zip(*model.named_parameters(), strict=True)
        *gradients, of_table = torch.autograd.grad(loss, [*parameters, seen.table])
        theirs = _theirs(rules, dict(zip(names, gradients, strict=True)))
        if call == 0:
            found["train_grad_lm_head"], found["train_grad_puzzle_local"] = theirs["lm_head.weight"], of_table
        if "continue" in parts:
            put("q_continue_loss", parts["continue"].sum)
            put("target_q_continue", continue_target(seen.said[1], carry[STEPS] >= model.spec.default_steps))
        with torch.no_grad():
            logits = model.head(model.coda(outcome.last, seen.encode(carry[TOKENS])))
        scored = carry[LABELS] != IGNORED
        share = (scored & (logits.argmax(-1) == carry[LABELS])).float().sum(1) / scored.sum(1).clamp(min=1)
        counted = carry[HALTED] & scored.any(1)
        put("current_inputs", carry[TOKENS].int())
        put("halted", carry[HALTED].to(torch.uint8))
        put("steps", carry[STEPS].int())
        put("q_halt_logits", seen.said[0][:, 0])
        put("q_continue_logits", seen.said[0][:, 1])
        put("lm_loss", parts["lm"].sum)
        put("q_halt_loss", parts["halt"].sum)
        put("loss", loss)
        put("gradnorm", torch.stack([theirs[name].norm() for name in sorted(theirs)]))
        put("count", counted.sum())
        put("accuracy_sum", (share * counted).sum())
        put("exact_sum", (counted & solved(logits, carry[LABELS])).sum())
    return {name: torch.stack(values) if isinstance(values, list) else values for name, values in found.items()}


def _batch(tokens, labels):
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=torch.arange(tokens.shape[1]).expand(tokens.shape),
        document_ids=None,
        rows=torch.arange(len(tokens)),
        start=Position(0, 0, 0),
        data_hash="",
    )


def _theirs(rules, gradients):
    """By the original's names; rules of buffers have no gradient."""
    found = [(rule, [gradients[name] for name in rule.ours]) for rule in rules if set(rule.ours) <= set(gradients)]
    return {name: t for rule, ours in found for name, t in zip(rule.theirs, rule.write(ours), strict=True)}
