"""The training loop of TRM and HRM over our models, written out: slots, halting, and the loss of each call.

A batch has fixed slots. Before a call, a slot whose puzzle halted takes the offered puzzle and starts over; the others
go on from their detached state. A call is one supervision step; its loss is

    sum over slots of  mean over scored cells of stablemax cross-entropy
                       + 1/2 (halting loss [+ continue loss])        binary cross-entropies with logits
    halting target: the whole puzzle is right;  continue target: sigmoid of what one more call would say

Exploration is off, as in what was recorded.
"""

import torch
import torch.nn.functional as F

from looplab.recurrence import state as states
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.recurrence.loop import run_plan
from looplab.recurrence.trace import Recorder
from tolerances import PUBLISHED_GRADIENTS, PUBLISHED_OUTPUTS

IGNORED = -100
INPUTS = {"inputs", "labels", "puzzle_identifiers", "train_inputs", "train_labels", "train_puzzle_identifiers"}
"""What was recorded of the data; the rest is to be compared."""


def agree(name, found, expected):
    """Integers equal, gradients and everything else within their bounds."""
    if not expected.is_floating_point():
        assert torch.equal(found.to(expected.dtype), expected)
        return
    bound = PUBLISHED_GRADIENTS if "grad" in name else PUBLISHED_OUTPUTS
    torch.testing.assert_close(found.detach(), expected, check_dtype=False, **bound)


def log_stablemax(logits):
    x = logits.double()
    s = torch.where(x < 0, 1 / (1 - x + 1e-30), x + 1)
    return torch.log(s / s.sum(dim=-1, keepdim=True))


def stablemax_loss(logits, labels):
    """Per puzzle, the mean over its scored cells."""
    scored = labels != IGNORED
    picked = log_stablemax(logits).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(picked * scored).sum(dim=1) / scored.sum(dim=1).clamp(min=1)


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


def train(model, io, *, window, bootstraps, rules):
    """The recorded calls of training, by the names of the recording.

    Args:
        window: Trailing applications of a call that carry gradient.
        bootstraps: Whether the continue logit is trained, and halting compares it with the halting logit.
        rules: Of the key map, to give gradients the names of the original.
    """
    spec, rows = model.spec, io["train_inputs"].shape[1]
    step_plan = spec.plan(1)
    offered = ("train_inputs", "train_labels", "train_puzzle_identifiers")
    held = [torch.zeros_like(io[name][0]).long() for name in offered]
    carry = None
    steps, halted = torch.zeros(rows, dtype=torch.int32), torch.ones(rows, dtype=torch.bool)
    found = {}

    def put(name, value):
        found.setdefault(f"train_{name}", []).append(value.detach())

    for call in range(len(io["train_inputs"])):
        held = [
            torch.where(halted.view(-1, *[1] * (h.dim() - 1)), io[name][call].long(), h)
            for name, h in zip(offered, held, strict=True)
        ]
        inputs, labels, puzzles = held
        # A table with one row per slot, so that every slot's gradient is told apart.
        table = model.puzzles.table[puzzles].clone().requires_grad_()
        context = _encode_with(model, table, inputs)
        fresh = model.init_state(context, None)
        state = fresh if carry is None else states.where(halted, fresh, carry)
        end = run_plan(model, step_plan, context, state, gradient=TruncatedBPTT(window=window))
        carry = states.detach(end)
        logits, q = model.head(model.coda(end, context)), model.halt(end)
        steps = torch.where(halted, 0, steps) + 1
        last = steps >= spec.default_steps
        halted = last | (q[:, 0] > (q[:, 1] if bootstraps else 0))

        scored = labels != IGNORED
        correct = scored & (logits.argmax(dim=-1) == labels)
        solved = correct.sum(dim=1) == scored.sum(dim=1)
        lm = stablemax_loss(logits, labels).sum()
        halt_loss = F.binary_cross_entropy_with_logits(q[:, 0], solved.float(), reduction="sum")
        loss = lm + 0.5 * halt_loss
        if bootstraps:
            with torch.no_grad():
                q_next = model.halt(run_plan(model, step_plan, context, carry))
                target = torch.sigmoid(torch.where(last, q_next[:, 0], q_next.amax(dim=1)))
            more = F.binary_cross_entropy_with_logits(q[:, 1], target, reduction="sum")
            loss = loss + 0.5 * more
            put("q_continue_loss", more)
            put("target_q_continue", target)
        names, parameters = zip(*model.named_parameters(), strict=True)
        *gradients, of_table = torch.autograd.grad(loss, [*parameters, table])
        theirs = _theirs(rules, dict(zip(names, gradients, strict=True)))
        if call == 0:
            found["train_grad_lm_head"], found["train_grad_puzzle_local"] = theirs["lm_head.weight"], of_table

        counted = halted & scored.any(dim=1)
        share = correct.float().sum(dim=1) / scored.sum(dim=1).clamp(min=1)
        put("current_inputs", inputs.int())
        put("halted", halted.to(torch.uint8))
        put("steps", steps)
        put("q_halt_logits", q[:, 0])
        put("q_continue_logits", q[:, 1])
        put("lm_loss", lm)
        put("q_halt_loss", halt_loss)
        put("loss", loss)
        put("gradnorm", torch.stack([theirs[name].norm() for name in sorted(theirs)]))
        put("count", counted.sum())
        put("accuracy_sum", (share * counted).sum())
        put("exact_sum", (counted & solved).sum())
    return {name: torch.stack(values) if isinstance(values, list) else values for name, values in found.items()}


def _theirs(rules, gradients):
    """By the original's names; rules of buffers have no gradient."""
    found = [(rule, [gradients[name] for name in rule.ours]) for rule in rules if set(rule.ours) <= set(gradients)]
    return {name: t for rule, ours in found for name, t in zip(rule.theirs, rule.write(ours), strict=True)}


def _encode_with(model, table, inputs):
    """The context of `inputs`, where row i of `table` is the vector of row i."""
    kept, model.puzzles.table = model.puzzles.table, table
    context = model.encode(inputs, extras={"puzzle_ids": torch.arange(len(inputs))})
    model.puzzles.table = kept
    return context
