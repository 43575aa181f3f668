"""The shared walk of an audit against schedule by schedule: same model, documents and schedules.

Both sides visit the same states; losses must agree before a time is printed. Counts come from the ledger.
"""

import argparse
from typing import Any

import torch

import looplab
from benchmarks.baselines import schedule_by_schedule
from benchmarks.timing import paired, ratio, report
from looplab.audit import schedules
from looplab.data.corpus import builtin_corpus
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="text-2x4-fixed")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = looplab.load(options.model, device=options.device)
    model = loaded.model
    texts = [d.text for d in builtin_corpus("heldout").documents if len(d.text.encode()) >= options.tokens][
        : options.documents
    ]
    ids = torch.tensor([loaded.tokenizer.encode(text)[: options.tokens] for text in texts]).to(options.device)
    full = schedules.full_plan(model.spec)
    units = len(full.units)
    grid = range(1, units)
    asked = [schedules.full()] + [
        rule(k) for k in grid for rule in (schedules.prefix, schedules.suffix, schedules.repeat)
    ]
    plans = {str(s): s.plan(full) for s in asked}
    root = schedules.trie({name: (plan, full.word(plan)) for name, plan in plans.items()})
    with torch.no_grad():
        context = model.encode(ids)
        state = model.init_state(context, None)
    losses: dict[str, dict[str, float]] = {"shared": {}, "separate": {}}

    def loss(state: Any) -> float:
        with torch.no_grad():
            logits = model.head(model.coda(state, context))[:, :-1]
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))

    def shared(read: bool = False) -> Ledger:
        ledger = Ledger()

        def visit(node: Any, state: Any) -> None:
            if read:
                losses["shared"].update(dict.fromkeys(node.wanted, loss(state)))

        walk(model, context, state, root, visit, ledger=ledger)
        return ledger

    def separate(read: bool = False) -> Ledger:
        ledger = Ledger()

        def visit(name: str, state: Any) -> None:
            if read:
                losses["separate"][name] = loss(state)

        schedule_by_schedule.run(model, context, state, plans, visit, ledger)
        return ledger

    counts = {
        name: side(read=True).row_applications // len(ids)
        for name, side in (("shared", shared), ("separate", separate))
    }
    assert losses["shared"] == losses["separate"], "the two sides do not compute the same losses"
    assert counts["shared"] == root.size(), "the shared walk ran more than the trie has nodes"
    slow, fast = paired(separate, shared, pairs=options.pairs)
    report("audit_walk", {"applications": counts, "schedules": len(plans), **ratio(slow, fast)}, options.out)


if __name__ == "__main__":
    main()
