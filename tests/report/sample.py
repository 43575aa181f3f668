"""Audit results with planted numbers: what report/ draws, without running a model.

The loss of a plan is 2.2 nats plus what it lacks: applications, distinct iterations of block 0, and iterations of the
last block. Schedules, words and identifiability are those of looplab.audit.schedules.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from looplab.audit import result as r
from looplab.audit.config import AuditConfig
from looplab.audit.schedules import FullPlan, default_schedules, live_states, minimal_applications, schedule_map, trie
from looplab.audit.verdict import agreements
from looplab.records import Finding, Level
from looplab.recurrence.plan import Plan

FLOOR = 2.2
PROBES = {"raw": 1.0, "temperature": 0.835, "affine": 0.675}
"""Readout -> what it leaves of the loss above the floor at full depth."""
Loss = Callable[[Plan], float]


def estimate(value: float, half: float) -> r.Estimate:
    """`value` with symmetric intervals of half width `half` at 95 %."""
    low, high, narrow = value - half, value + half, 0.84 * half
    return r.Estimate(
        value=value,
        low=low,
        high=high,
        low90=value - narrow,
        high90=value + narrow,
        plain_low=low + 0.01 * half,
        plain_high=high - 0.01 * half,
    )


def looped_loss(last: int) -> Loss:
    """More applications help once, distinct iterations of block 0 hardly, iterations of block `last` most."""

    def loss(plan: Plan) -> float:
        iterations = {block: len({i for b, i in plan if b == block}) for block in range(last + 1)}
        count = 0.351 * math.exp(-(len(plan) - 1) / 1.1)
        start = 0.9 if all(block != 0 for block, _ in plan) else 0.0
        return FLOOR + count + start + 0.0025 * (4 - min(4, iterations[0])) + 0.16 * (4 - min(4, iterations[last]))

    return loss


def dense_loss(plan: Plan) -> float:
    """Every missing layer costs, the first ones most."""
    return FLOOR + 0.04 * (6 - len(set(plan))) ** 2 + 0.01 * (6 - len(plan))


def probed(value: float, probe: str, factor: float = 1.0) -> float:
    """The planted loss under a refitted readout."""
    return value if probe == "raw" else FLOOR - 0.004 + (value - FLOOR) * (1 - (1 - PROBES[probe]) * factor)


def card(name: str, full: FullPlan, *, dense: bool = False, trained: tuple[int, int] | None = (8, 8)) -> r.ModelCard:
    blocks = tuple("1 layer, reads the state and the context, writes the state" for _ in full.writers)
    law = (
        "unknown"
        if trained is None
        else f"fixed {trained[1]}"
        if trained[0] == trained[1]
        else f"uniform {trained[0]}..{trained[1]}"
    )
    return r.ModelCard(
        name=name,
        source=name,
        architecture="dense" if dense else "looped",
        version="1",
        parameters={"embedding": 32_768, "prelude": 262_144, "core": 131_072, "head": 32_768, "total": 458_752},
        dense=dense,
        blocks=blocks,
        default_steps="1" if dense else "(4, 4)",
        trained_depth=law,
        trained_units=trained,
        applications=len(full.plan),
        unit_applications=len(full.units[0]),
        units=full.M,
        kmid=full.kmid,
        index_parts=() if dense else ("iteration embedding",),
        kv_rule="DepthIndexed(Refuse)",
        noise_width=0,
        vocabulary=256,
        max_positions=512,
        dtype="float32",
        weight_hash="a3f1c05d9be2470c",
        tokenizer="bytes",
    )


def bins(lean: float) -> tuple[r.ReliabilityBin, ...]:
    """15 bins of a readout that is right less often than it says, by `lean` in the middle."""
    found = []
    for i in range(15):
        middle = (i + 0.5) / 15
        count = 0 if i == 0 else int(9000 * math.exp(-2.5 * abs(middle - 0.55)))
        accuracy = max(0.0, middle - 4 * lean * middle * (1 - middle))
        low, high = i / 15, (i + 1) / 15
        found.append(r.ReliabilityBin(low=low, high=high, count=count, accuracy=accuracy, confidence=middle))
    return tuple(found)


def geometry(excess: float) -> tuple[r.Geometry, ...]:
    """hidden and state, the further from full depth the larger the loss."""
    return tuple(
        r.Geometry(
            site=site,
            tokens=4096,
            zero_rows=0,
            norm=11.0 - 2 * excess,
            norm_ratio=1 - 0.2 * excess,
            cosine=max(-0.2, 1 - share * excess),
            cka=math.exp(-share * excess),
            effective_rank=40 - 14 * excess,
            rank_ratio=1 - 0.35 * share * excess,
            anisotropy=0.1 + 0.1 * excess,
            frechet=0.4 * share * excess,
        )
        for site, share in (("hidden", 0.6), ("state", 1.0))
    )


def updates(plan: Plan) -> tuple[r.Update, ...]:
    """Updates that shrink while the application stays the same, and jump at a new block."""
    found, stale, last = [], 0, None
    for j, (block, iteration) in enumerate(plan):
        stale = stale + 1 if (block, iteration) == last else 0
        relative = None if j == 0 else (0.9 if last and block != last[0] else 0.35) * 0.6**stale / (1 + 0.2 * j)
        last = (block, iteration)
        found.append(
            r.Update(
                application=j,
                block=block,
                iteration=iteration,
                component="state",
                relative=relative,
                low=None if relative is None else 0.8 * relative,
                high=None if relative is None else 1.3 * relative,
                state_cosine=None if j == 0 else 0.9,
                update_cosine=None if j < 2 else 0.3 - 0.1 * stale,
            )
        )
    return tuple(found)


def schedule_result(name: str, k: int | None, value: float, factor: float) -> r.ScheduleResult:
    excess = value - FLOOR
    losses = tuple(
        r.ProbeLoss(
            probe=probe,
            loss=estimate(probed(value, probe, factor), 0.06),
            per_byte=probed(value, probe, factor),
            seeds=(probed(value, probe, factor),),
        )
        for probe in PROBES
    )
    uniform = excess > 1.4
    temperature = r.TemperatureFit(
        beta=0.0 if uniform else 1 / (1 + 0.6 * excess),
        temperature=None if uniform else 1 + 0.6 * excess,
        status="uniform" if uniform else "converged",
        low=None if uniform else 0.97 + 0.55 * excess,
        high=None if uniform else 1.03 + 0.66 * excess,
        passes=5,
        in_sample=None,
        cross={},
    )
    metrics = tuple(
        r.TokenMetrics(
            probe=probe,
            accuracy=0.48 - 0.1 * excess,
            confidence=0.5,
            ece=0.03 + 0.05 * excess,
            ece_equal_mass=0.03,
            brier=0.61 + 0.05 * excess,
            entropy=2.1,
            logit_norm=41.0,
            logit_norm_centred=40.2,
            kl_to_full=excess if probe == "raw" else None,
            agreement_to_full=0.9 - 0.2 * excess if probe == "raw" else None,
            bins=bins(0.02 + 0.12 * excess if probe == "raw" else 0.015),
        )
        for probe in ("raw", "temperature")
    )
    affine = r.AffineFit(penalty=0.001, converged=True, convex=True, iterations=31)
    return r.ScheduleResult(
        name=name, k=k, diverged_at=None, losses=losses, temperature=temperature, affine=affine, metrics=metrics
    )


def described(planted: "Planted", kmid: int) -> tuple[r.ScheduleResult, ...]:
    """The schedules with geometry everywhere, updates along three plans and two full-rank fits."""
    fit = r.FullRankFit(objective="nll", penalty=0.01, converged=True, convex=True, iterations=44, tokens=30_000)
    plans = {row.name: Plan.parse(row.plan) for row in planted.rows}
    return tuple(
        dataclasses.replace(
            schedule,
            geometry=geometry(planted.q(schedule.name) - planted.q("full")),
            updates=updates(plans[schedule.name]) if schedule.name in ("full", "repeat(1)", f"repeat({kmid})") else (),
            full_rank=fit if schedule.name in ("prefix(1)", "full") else None,
        )
        for schedule in planted.schedules()
    )


@dataclasses.dataclass(frozen=True)
class Planted:
    """One model's schedules with the loss each has under each readout."""

    rows: tuple[r.ScheduleEntry, ...]
    loss: Loss
    factor: float
    half: float
    words: dict[str, str] = dataclasses.field(default_factory=lambda: WORDS)

    def q(self, name: str, probe: str = "raw") -> float:
        row = next(row for row in self.rows if row.name == name)
        return probed(self.loss(Plan.parse(row.plan)), probe, self.factor if row.family != "full" else 1.0)

    def at(self, plan: Plan, probe: str) -> float:
        """Loss of a plan that has no row."""
        return probed(self.loss(plan), probe, self.factor)

    def word(self, name: str) -> str:
        return next(row.word for row in self.rows if row.name == name)

    def schedules(self) -> tuple[r.ScheduleResult, ...]:
        return tuple(
            schedule_result(row.name, row.k, self.q(row.name), self.factor) for row in self.rows if row.reason is None
        )

    def contrast(self, plus: Sequence[str], minus: str, probe: str, family: str, k: int | None) -> r.Contrast:
        reasons = [row.reason for row in self.rows if row.name in plus and row.reason]
        effects = [self.q(name, probe) - self.q(minus, probe) for name in plus]
        mean = sum(effects) / len(effects)
        effect = None if reasons else estimate(mean, self.half * abs(mean) + 0.003)
        draws = len(plus) > 1 and effect is not None
        return r.Contrast(
            name=f"{'mean permute' if draws else plus[0]} - {minus}",
            plus=plus[0],
            minus=minus,
            probe=probe,
            family=family,
            k=k,
            effect=effect,
            spread=(min(effects), max(effects)) if draws else None,
            margin=None if effect is None else 0.02,
            equivalent=None if effect is None else max(abs(effect.low90), abs(effect.high90)) < 0.02,
            bitwise_equal=False,
            reason=f"not identifiable: {reasons[0]}" if reasons else None,
        )

    def contrasts(self) -> tuple[r.Contrast, ...]:
        found = []
        permutes = [row.name for row in self.rows if row.family == "permute"]
        for probe in PROBES:
            for row in self.rows[1:]:
                if row.family != "permute":
                    family = "order" if row.family.endswith("major") else row.family
                    found.append(self.contrast([row.name], "full", probe, f"{family}-full", row.k))
            if permutes:
                found.append(self.contrast(permutes, "full", probe, "permute-full", None))
        return tuple(found)

    def gaps(self) -> dict[str, r.Estimate]:
        names = [row.name for row in self.rows if row.family == "prefix"]
        return {name: estimate(self.q(name) - self.q("full"), 0.02 * (self.q(name) - self.q("full"))) for name in names}

    def gains(self) -> tuple[r.ProbeGain, ...]:
        found = []
        for probe in ("temperature", "affine"):
            at_full = self.q("full") - self.q("full", probe)
            for row in self.rows:
                if row.family == "prefix":
                    gap, gross = self.q(row.name) - self.q("full"), self.q(row.name) - self.q(row.name, probe)
                    net = gross - at_full
                    share = estimate(net / gap, 0.014) if gap > 0.05 else None
                    word = (
                        "inconclusive (gap too small)" if share is None else "present" if share.low > 0.05 else "absent"
                    )
                    found.append(
                        r.ProbeGain(
                            probe=probe,
                            schedule=row.name,
                            k=row.k or 0,
                            gap=estimate(gap, 0.03),
                            gross=estimate(gross, 0.02),
                            gross_full=estimate(at_full, 0.002),
                            net=estimate(net, 0.015),
                            share=share,
                            word=word,
                            flattening=gap > 1.4,
                        )
                    )
        return tuple(found)


def factorial(planted: Planted, kmid: int, units: int, probe: str) -> r.Factorial:
    """Four cells on the first block, their effects and both structural orders."""
    full = planted.q("full", probe)
    q00, q10 = (planted.at(Plan.of([(0, 0)] * count), probe) for count in (kmid, units))
    q01, q11 = planted.q(f"prefix({kmid})", probe), planted.q(f"repeat({kmid})", probe)
    whole = planted.q("prefix(1)", probe)
    names = (f"same({kmid})", f"prefix({kmid})", f"same({units})", f"repeat({kmid})")
    values = {
        f"index effect at {kmid}": (f"{names[0]} - {names[1]}", q00 - q01),
        f"index effect at {units}": (f"{names[2]} - {names[3]}", q10 - q11),
        "count effect at one index": (f"{names[0]} - {names[2]}", q00 - q10),
        f"count effect at {kmid} indices": (f"{names[1]} - {names[3]}", q01 - q11),
        "interaction": (f"({names[0]} - {names[1]}) - ({names[2]} - {names[3]})", q00 - q01 - q10 + q11),
        "index, Shapley": ("mean of the two index effects", (q00 - q01 + q10 - q11) / 2),
        "count, Shapley": ("mean of the two count effects", (q00 - q10 + q01 - q11) / 2),
        "own indices last": (f"repeat_first({units}) - {names[3]}", 0.004),
        "indices in a cycle": (f"cyclic({units}) - {names[3]}", -0.031),
    }
    orders = {
        "count first": (whole - q10, q10 - q11, q11 - full),
        "index first": (whole - q00 + q01 - q11, q00 - q01, q11 - full),
    }
    parts = ("application", "distinct", "composition")
    return r.Factorial(
        probe=probe,
        cells={name: estimate(q, 0.06) for name, q in zip(names, (q00, q01, q10, q11), strict=True)},
        effects=tuple(
            r.Effect(
                name=name,
                formula=formula,
                nats=estimate(value, 0.003 + 0.05 * abs(value)),
                equivalent=abs(value) < 0.016,
                bitwise_equal=False,
            )
            for name, (formula, value) in values.items()
        ),
        orders=tuple(
            r.Ordering(name=name, terms={p: estimate(v, 0.005) for p, v in zip(parts, terms, strict=True)})
            for name, terms in orders.items()
        ),
    )


def four_way(planted: Planted, raw: r.Factorial, refit: r.Factorial) -> r.FourWay:
    """The gap to the refitted full depth by four orders."""
    probe = refit.probe
    first, last = (planted.q(name) - planted.q(name, probe) for name in ("prefix(1)", "full"))
    paths = {
        f"{order.name}, probe {where}": {part: e.value for part, e in order.terms.items()} | {"calibration": gain}
        for where, found, gain in (("last", raw, last), ("first", refit, first))
        for order in found.orders
    }
    columns = {term: [terms[term] for terms in paths.values()] for term in next(iter(paths.values()))}
    return r.FourWay(
        probe=probe,
        whole=estimate(planted.q("prefix(1)") - planted.q("full", probe), 0.03),
        paths=tuple(
            r.Ordering(name=name, terms={term: estimate(value, 0.006) for term, value in terms.items()})
            for name, terms in paths.items()
        ),
        mean={term: estimate(sum(values) / len(values), 0.005) for term, values in columns.items()},
        spread={term: (min(values), max(values)) for term, values in columns.items()},
    )


STRATA = {
    "loss": ("lowest third", "middle third", "highest third"),
    "length": ("shortest third", "middle third", "longest third"),
    "position": ("0 to 63", "64 to 255", "256 to 511", "512 and later"),
}


def strata(parts: Sequence[r.Part], gains: Sequence[r.ProbeGain]) -> tuple[r.Stratum, ...]:
    """Every stratum has the same split, at another size."""
    net = {gain.probe: gain.net.value for gain in gains if gain.k == 1}
    found = []
    for kind, labels in STRATA.items():
        for i, label in enumerate(labels):
            size = 0.8 + 0.2 * i
            values = {p.name: None if p.nats is None else estimate(size * p.nats.value, 0.02) for p in parts}
            found.append(
                r.Stratum(
                    by=kind,
                    label=label,
                    documents=67,
                    tokens=33_800,
                    gap=estimate(size * 0.998, 0.05),
                    parts=values,
                    gains={probe: estimate(size * value, 0.02) for probe, value in net.items()},
                )
            )
    return tuple(found)


def extension(planted: Planted, units: int) -> r.Contrast:
    """Half as many units again."""
    name = f"extend_last({units + units // 2})"
    effect = estimate(0.041, 0.008)
    return r.Contrast(
        name=f"{name} - full",
        plus=name,
        minus="full",
        probe="raw",
        family="extend-full",
        k=units + units // 2,
        effect=effect,
        spread=None,
        margin=0.02,
        equivalent=False,
        bitwise_equal=False,
        reason=None,
    )


def complete(found: r.DomainResult, planted: Planted, model: r.ModelCard) -> r.DomainResult:
    """The domain with everything that an audit measures beyond the answer."""
    indexed = planted.word("repeat(1)") != planted.word("full")
    squares = tuple(factorial(planted, model.kmid, model.units, probe) for probe in PROBES) if indexed else ()
    return dataclasses.replace(
        found,
        schedules=described(planted, model.kmid),
        contrasts=(*found.contrasts, extension(planted, model.units)),
        four_way=tuple(four_way(planted, squares[0], square) for square in squares[1:]),
        factorials=squares,
        no_factorial=None if indexed else "not identifiable: the block has no iteration index",
        strata=strata(found.decompositions[0].parts, found.gains),
    )


WORDS = {
    "application": "substantial",
    "distinct": "negligible (equivalent to zero within 0.020 nats), but not zero",
    "composition": "dominant",
}


def decomposition(planted: Planted, kmid: int, probe: str, seed_deviation: float | None) -> r.Decomposition:
    chain = (
        "prefix(1)",
        "repeat(1)",
        f"repeat({kmid})" if kmid < len(Plan.parse(planted.rows[0].plan)) else "full",
        "full",
    )
    gap = planted.q("prefix(1)", probe) - planted.q("full", probe)
    parts = []
    for name, plus, minus in zip(("application", "distinct", "composition"), chain[:-1], chain[1:], strict=True):
        nats = planted.q(plus, probe) - planted.q(minus, probe)
        trivial = planted.word(plus) == planted.word(minus)
        whole = not trivial and {planted.word(x) for x in chain} == {planted.word(plus), planted.word(minus)}
        reason = (
            "the block has no iteration index" if trivial else "takes the whole gap by construction" if whole else None
        )
        parts.append(
            r.Part(
                name=name,
                plus=plus,
                minus=minus,
                nats=None if reason else estimate(nats, 0.02 * abs(nats) + 0.001),
                share=None if reason else estimate(nats / gap, 0.02 * abs(nats / gap) + 0.002),
                seed_deviation=None if reason else seed_deviation,
                equivalent=None if reason else abs(nats) < 0.018,
                bitwise_equal=False,
                word=f"not identifiable ({reason})" if reason else planted.words[name],
                reason=None if reason is None else f"not identifiable: {reason}",
            )
        )
    return r.Decomposition(
        probe=probe, gap=estimate(gap, 0.03 * gap), gap_measurable=True, margin=0.02, parts=tuple(parts)
    )


def sentence(domain: str, card: r.ModelCard, decompositions: Sequence[r.Decomposition], gain: r.ProbeGain) -> str:
    """A verdict in the wording of the audit."""
    share = gain.share
    refit = f"Refitting the readout ({gain.probe}) removes {r.percent(share)} of the gap, net of full depth."
    if not decompositions:
        return (
            f"On {domain}, cutting the stack to {gain.k} of {card.units} layers costs {r.nats(gain.gap)} nats. {refit}"
        )
    raw = decompositions[0]

    def part(name: str) -> str:
        found = raw.part(name)
        return found.word if found.nats is None else f"{r.nats(found.nats)} nats, {found.word}"

    return (
        f"On {domain}, {card.applications} applications instead of 1 lower the loss by {r.nats(raw.gap)} nats. Running "
        f"more applications of the first unit: {part('application')}; distinct iterations inside the first block: "
        f"{part('distinct')}; later blocks: {part('composition')}. {refit}"
    )


def documents(name: str) -> r.DocumentCounts:
    return r.DocumentCounts(
        source=f"{name}.txt",
        data_hash="77b0a1c4",
        read=431,
        duplicates=4,
        empty=1,
        unscored=0,
        evaluation=200,
        calibration=200,
        evaluation_tokens=101_422,
        calibration_tokens=50_000,
        evaluation_bytes=101_422,
        affine_tokens=12_000,
        longest=1024,
        cut=17,
        overlap=0.012,
        padding=0.041,
    )


def domain(
    name: str, model: r.ModelCard, planted: Planted, control: r.DenseControl | None, *, whole: bool
) -> r.DomainResult:
    """One domain; `whole` with all that an audit measures, else only what every audit has."""
    gains = planted.gains()
    best = max((gain for gain in gains if gain.k == min(g.k for g in gains)), key=lambda gain: gain.net.value)
    parts = () if model.dense else tuple(decomposition(planted, model.kmid, probe, None) for probe in PROBES)
    found = r.DomainResult(
        name=name,
        documents=documents(name),
        schedules=planted.schedules(),
        contrasts=planted.contrasts(),
        decompositions=parts,
        gains=gains,
        gaps_per_byte=planted.gaps(),
        control=control,
        verdict=r.Verdict(
            sentence=sentence(name, model, parts, best),
            words={p.name: p.word for p in parts[0].parts} if parts else {},
            best_probe=best.probe,
            probe_words={g.probe: g.word for g in gains if g.k == best.k},
            recurrence="not supported" if control else "not measured",
        ),
    )
    return complete(found, planted, model) if whole else found


def dense_control() -> r.DenseControl:
    full = FullPlan.of(Plan.of((block, 0) for block in range(6)), lambda block, iteration: 0)
    rows = schedule_map(full, default_schedules(full, grid=(2, 3, 5), controls=("suffix",)))
    planted = Planted(rows, dense_loss, 0.9, 0.05)
    comparisons = tuple(
        r.ControlComparison(
            probe=probe,
            looped_k=1,
            dense_k=dense_k,
            at=at,
            looped_gap_per_byte=0.83,
            dense_gap_per_byte=gap,
            difference=estimate(0.01, 0.03),
            word="not supported",
        )
        for probe in ("temperature", "affine")
        for at, dense_k, gap in (("smallest k", 1, 1.05), ("nearest gap", 2, 0.68))
    )
    return r.DenseControl(
        model=card("dense-6", full, dense=True, trained=(6, 6)),
        schedule_map=rows,
        schedules=planted.schedules(),
        contrasts=planted.contrasts(),
        gains=planted.gains(),
        gaps_per_byte=planted.gaps(),
        comparisons=comparisons,
    )


def finding(level: Level, kind: str, message: str, **more: object) -> Finding:
    return Finding(kind=f"audit.{kind}", level=level, message=message, **more)  # type: ignore[arg-type]


def assemble(
    name: str,
    full: FullPlan,
    loss: Loss,
    *,
    domains: Sequence[str] = ("text",),
    dense: bool = False,
    factor: float = 1.0,
    trained: tuple[int, int] | None = (8, 8),
    control: r.DenseControl | None = None,
    findings: Sequence[Finding] = (),
    whole: bool = False,
) -> r.AuditResult:
    """The result of one planted model; `whole` with all that an audit measures."""
    schedules = default_schedules(full)
    rows = schedule_map(full, schedules)
    model = card(name, full, dense=dense, trained=trained)
    config = AuditConfig()
    words = {str(s): (s.plan(full), full.word(s.plan(full))) for s in schedules}
    minimal = minimal_applications(word for _, word in words.values())
    found = tuple(
        domain(
            d,
            model,
            Planted(
                rows,
                lambda plan, i=i: loss(plan) + (loss(plan) - FLOOR) * 0.7 * i,
                factor,
                0.04 + 0.02 * i,
                WORDS if i == 0 else {**WORDS, "distinct": "present"},
            ),
            control,
            whole=whole,
        )
        for i, d in enumerate(domains)
    )
    agreed = agreements({d.name: d.decompositions for d in found}, {d.name: d.gains for d in found})
    tests = tuple(
        r.SelfTest(name=f"T{n}", title=title, passed=True, margin=margin, limit=limit, note="")
        for n, (title, margin, limit) in enumerate(
            (
                ("weights load and count", None, None),
                ("full plan equals a plain loop", 3.1e-7, 1e-5),
                ("a row ignores its neighbours", 8.0e-8, 1e-5),
                ("padding changes nothing", 1.2e-7, 1e-5),
                ("causal", 0.0, 0.0),
                ("declared classes hold", 0.0, 0.0),
                ("readout is the head's", 0.0, 1e-6),
                ("splits are disjoint", None, None),
                ("same bytes twice", 0.0, 0.0),
            ),
            1,
        )
    )
    phases = tuple(
        r.PhaseCounts(
            phase=phase, applications=a, tokens=a * 500, readouts=a // 3, head_tokens=a * 160, flops=a * 131_072_000
        )
        for phase, a in (("self-tests", 96), ("calibration", minimal * 200), ("fits", 0), ("evaluation", minimal * 200))
    )
    return r.AuditResult(
        model=model,
        config=config,
        config_hash="0f5e7d21c3b4a698",
        schedule_map=rows,
        domains=found,
        agreements=agreed,
        self_tests=tests,
        findings=tuple(findings),
        counts=r.AuditCounts(
            minimal_applications=minimal,
            naive_applications=sum(len(plan) for plan, _ in words.values()),
            readouts=sum(row.reason is None for row in rows),
            live_states=live_states(trie(words)),
            documents=200,
            seeds=1,
            applications=minimal * 200,
            phases=phases,
        ),
        versions={"looplab": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        command=f"looplab audit {name} --out audit-out",
    )


def two_blocks(*, domains: Sequence[str] = ("text",), sampled: bool = False) -> r.AuditResult:
    """2 blocks of 4 indexed iterations with its dense twin; `sampled` is the model of the sampled-depth recipe."""
    full = FullPlan.of(Plan.of((b, i) for b in range(2) for i in range(4)), lambda block, iteration: iteration)
    looped = looped_loss(1)
    if sampled:
        return assemble(
            "sampled-2x4",
            full,
            lambda plan: FLOOR + (looped(plan) - FLOOR) / 4,
            factor=0.2,
            trained=(1, 8),
            domains=domains,
        )
    findings = (
        finding(Level.INFO, "byte_tokens", "the folder has no tokenizer; text is read as bytes, ids 0..255, no bos."),
        finding(
            Level.WARNING,
            "few_documents",
            "62 calibration documents; intervals of temperature are rough below 100.",
            remedy="Give more text.",
            value=62.0,
            threshold=100.0,
            reference="spec 5.3",
            where={"domain": "text"},
        ),
    )
    return assemble("fixed-2x4", full, looped, control=dense_control(), findings=findings, domains=domains, whole=True)


def single_core() -> r.AuditResult:
    """One index-free core of 4 iterations: nothing but the depth curve and the readout can be told."""
    full = FullPlan.of(Plan.of((0, i) for i in range(4)), lambda block, iteration: 0)
    reason = "takes the whole gap by construction"
    unknown = finding(Level.UNIDENTIFIED, "not_identifiable", f"application: {reason}", where={"part": "application"})
    return assemble("single-core", full, looped_loss(0), trained=(4, 4), findings=(unknown,), whole=True)


def deep_core() -> r.AuditResult:
    """One index-free core of 32 iterations, trained at every depth."""
    full = FullPlan.of(Plan.of((0, i) for i in range(32)), lambda block, iteration: 0)
    return assemble("deep-core", full, lambda plan: FLOOR + 1.7 / len(plan), trained=(1, 32))


def dense() -> r.AuditResult:
    """A dense stack of 6 layers."""
    full = FullPlan.of(Plan.of((block, 0) for block in range(6)), lambda block, iteration: 0)
    return assemble("dense-6", full, dense_loss, dense=True, trained=(6, 6))


CASES = {"two_blocks": two_blocks, "single_core": single_core, "dense": dense}
