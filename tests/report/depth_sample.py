"""The planted results of sample.py with what their depth is worth, from losses per document around the planted ones."""

import dataclasses
import functools

import numpy as np

from looplab.audit import result as r
from looplab.audit.bootstrap import ScheduleSums, bootstrap_losses
from looplab.audit.config import AuditConfig
from looplab.audit.depth_value import depth_value
from looplab.audit.schedules import FullPlan
from looplab.intervals import document_draws
from looplab.nn.cost import CostSpec, Group
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.plan import Blocks, ModelLoop, Plan, Sequential
from report.sample import deep_core, dense, single_core, two_blocks
from tiny import tiny_spec

DOCUMENTS = 120
GROUP = Group(matmul=131_072, attention_width=128, kv_width=256, layers=1)
COST = CostSpec(prelude=GROUP, blocks=(GROUP,) * 8, coda=Group(), head=Group(matmul=32_768))


def extension(plan: Plan, a: int) -> r.ScheduleEntry:
    last = plan.applications[-1:]
    longer = Plan(plan.applications + last * (a - len(plan)))
    return r.ScheduleEntry(
        name=f"extend_last({a})",
        family="extend_last",
        k=a,
        plan=str(longer),
        word=str(longer),
        applications=a,
        units=a,
        distinct=len(set(plan)),
        same_as=None,
        reason=None,
    )


def valued(
    result: r.AuditResult,
    *,
    extend: dict[int, float] | None = None,
    levels: dict[str, float] | None = None,
    noise: float = 0.02,
    times: bool = False,
) -> r.AuditResult:
    """`result` with a depth value in every domain.

    Args:
        extend: Units past full -> loss above full there, under every readout.
        levels: Schedule -> loss in place of the planted one, under every readout.
    """
    plan = Plan.parse(result.schedule_map[0].plan)
    blocks = len({block for block, _ in plan})
    order = Sequential() if result.model.dense else ModelLoop(num_steps=len(plan)) if blocks == 1 else None
    spec = tiny_spec(
        order or Blocks(num_steps=(len(plan) // blocks,) * blocks),
        blocks,
        4,
        cost=COST,
        trained_depth=FixedDepth(num_steps=len(plan) // blocks),
    )
    domains = tuple(
        _with_value(result, domain, plan, spec, extend or {}, levels or {}, noise, times) for domain in result.domains
    )
    return dataclasses.replace(result, domains=domains)


def _with_value(result, domain, plan, spec, extend, replaced, noise, times):
    rows = (*result.schedule_map, *(extension(plan, a) for a in extend))
    full = domain.schedule("full")
    levels = {schedule.name: {loss.probe: loss.loss.value for loss in schedule.losses} for schedule in domain.schedules}
    levels |= {
        f"extend_last({a})": {loss.probe: loss.loss.value + above for loss in full.losses}
        for a, above in extend.items()
    }
    levels |= {name: dict.fromkeys(levels[name], loss) for name, loss in replaced.items()}
    random = np.random.default_rng(0)
    tokens = random.integers(20, 200, size=DOCUMENTS).astype(float)
    tables = {}
    for name, level in levels.items():
        own = random.normal(size=DOCUMENTS)
        own = noise * (own - (own * tokens).sum() / tokens.sum())
        sums = {probe: tokens * (loss + own) for probe, loss in level.items()}
        tables[name] = ScheduleSums(raw=sums.pop("raw"), fixed=sums)
    draws = document_draws(DOCUMENTS, 2000, seed=0, domain=domain.name, split="evaluation")
    found = depth_value(
        bootstrap_losses(tables, draws, tokens=tokens),
        rows,
        domain=domain.name,
        full=FullPlan.of(plan, lambda block, iteration: iteration),
        spec=spec,
        unmeasured={},
        trained_units=result.model.trained_units,
        config=AuditConfig(replicates=2000),
        context_tokens=512,
        itemsize=2,
        milliseconds={row.name: 0.125 * row.applications for row in rows} if times else None,
    )
    return dataclasses.replace(domain, depth_value=found)


def extended_core() -> r.AuditResult:
    """One index-free core of 4, run up to 12: safe to 8."""
    return valued(single_core(), extend={6: 0.002, 8: -0.001, 12: 0.08}, times=True)


VALUED = {
    "two_blocks": lambda: valued(two_blocks()),
    "extended_core": extended_core,
    "saturated": lambda: valued(
        two_blocks(), levels={f"prefix({k})": 2.2 + 0.8 / 4**k for k in range(1, 8)} | {"full": 2.2}, noise=0.01
    ),
    "open": lambda: valued(two_blocks(), levels={"prefix(7)": 2.214, "full": 2.2}, noise=0.15),
    "deep_core": lambda: valued(deep_core(), extend={48: 0.0, 64: 0.3}),
    "noisy": lambda: valued(two_blocks(), noise=0.3, extend={10: 0.01}),
    "dense": lambda: valued(dense()),
}


@functools.cache
def made(case: str) -> r.AuditResult:
    """One of VALUED, made once."""
    return VALUED[case]()
