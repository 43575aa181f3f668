"""Strata: every number is that of the whole-domain code on the stratum's documents; small strata are left out."""

import dataclasses

import numpy as np
import pytest

from looplab.audit.bootstrap import ScheduleSums, bootstrap_losses
from looplab.audit.config import AuditConfig
from looplab.audit.decompose import decompositions, probe_gains
from looplab.audit.strata import BUCKETS, StratumSums, position_buckets, strata
from looplab.intervals import document_draws

CONFIG = AuditConfig(replicates=1000)
DOCUMENTS = 30
PROBES = ("temperature", "affine")
LEVELS = {"prefix(1)": 3.0, "repeat(1)": 2.6, "repeat(4)": 2.5, "full": 2.0}
LENGTHS = 80 + np.random.default_rng(0).permutation(620)[:DOCUMENTS]  # no ties, so thirds are tens
TOKENS = np.stack(
    [np.clip(LENGTHS - low, 0, high - low) for low, high in ((0, 64), (64, 256), (256, 512), (512, 1024))], 1
)


def sums(seeds=1, tokens=TOKENS):
    """Losses that fall with depth, more so in late positions and in hard documents."""
    losses = {}
    for s, (schedule, level) in enumerate(LEVELS.items()):
        own = np.random.default_rng(s).normal(size=tokens.shape) * 0.1
        hard = np.random.default_rng(9).normal(size=(DOCUMENTS, 1)) * 0.4
        raw = tokens * seeds * (level + own + hard * level / 3 - 0.1 * np.arange(4))
        for r, readout in enumerate(("raw", *PROBES)):
            losses[readout, schedule] = raw - r * 0.05 * level**2 * tokens * seeds
    return StratumSums(losses=losses, tokens=tokens, lengths=LENGTHS, seeds=seeds)


def run(given, reasons=None, unmeasured=None, config=CONFIG):
    return strata(
        given, domain="math", units=8, kmid=4, reasons=reasons or {}, unmeasured=unmeasured or {}, config=config
    )


def by_name(found):
    return {(s.by, s.label): s for s in found}


def whole(given, documents, buckets, kind, label):
    """The domain's own code, given only the tokens of one stratum."""
    tables = {
        name: ScheduleSums(
            raw=given.losses["raw", name][documents][:, buckets].sum(axis=1),
            fixed={p: given.losses[p, name][documents][:, buckets].sum(axis=1) for p in PROBES},
        )
        for name in LEVELS
    }
    draws = document_draws(len(documents), 1000, seed=0, domain="math", split=f"evaluation/{kind}/{label}")
    tokens = given.tokens[documents][:, buckets].sum(axis=1) * given.seeds
    losses = bootstrap_losses(tables, draws, tokens=tokens.astype(float))
    raw = decompositions(losses, units=8, kmid=4, reasons={}, unmeasured={}, config=CONFIG)[0]
    return raw, probe_gains(losses, grid=(1,), units=8, reasons={}, config=CONFIG)


def expected_members(given):
    """(kind, label) -> documents and buckets, by sorting."""
    everywhere = [0, 1, 2, 3]
    loss = given.losses["raw", "full"].sum(axis=1) / given.tokens.sum(axis=1)
    members = {}
    for kind, labels, values in (
        ("loss", ("low", "middle", "high"), loss),
        ("length", ("short", "middle", "long"), LENGTHS),
    ):
        order = sorted(range(DOCUMENTS), key=lambda d: values[d])
        for i, label in enumerate(labels):
            members[kind, label] = sorted(order[10 * i : 10 * i + 10]), everywhere
    for b, label in enumerate(BUCKETS):
        members["position", label] = [d for d in range(DOCUMENTS) if given.tokens[d, b]], [b]
    return members


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_stratum_is_the_decomposition_of_its_own_tokens(seeds):
    given = sums(seeds)
    found = by_name(run(given))
    members = expected_members(given)
    assert list(found) == list(members)
    for key, (documents, buckets) in members.items():
        stratum = found[key]
        raw, gains = whole(given, documents, buckets, *key)
        assert stratum.documents == len(documents)
        assert stratum.tokens == TOKENS[documents][:, buckets].sum()
        assert stratum.gap == raw.gap
        assert stratum.parts == {part.name: part.nats for part in raw.parts}
        assert stratum.gains == {gain.probe: gain.net for gain in gains}
        assert sum(part.value for part in stratum.parts.values()) == pytest.approx(stratum.gap.value, abs=1e-12)
        loss = given.losses["raw", "full"][documents][:, buckets].sum() / (seeds * stratum.tokens)
        shallow = given.losses["raw", "prefix(1)"][documents][:, buckets].sum() / (seeds * stratum.tokens)
        assert stratum.gap.value == pytest.approx(shallow - loss, abs=1e-12)


def test_parts_that_cannot_be_told_apart_have_no_number():
    found = run(sums(), reasons={("repeat(1)", "repeat(4)"): "the block has no iteration index"})
    assert all(s.parts["distinct"] is None and s.parts["application"] is not None for s in found)
    alone = {("repeat(1)", "repeat(4)"): "same plan as repeat(4)", ("repeat(4)", "full"): "same plan as full"}
    assert all(list(s.parts.values()) == [None] * 3 for s in run(sums(), reasons=alone))
    given = sums()
    for readout in ("raw", *PROBES):
        del given.losses[readout, "repeat(4)"]
    found = run(given, unmeasured={"repeat(4)": "diverged at application 5"})
    assert [name for name, part in found[0].parts.items() if part is None] == ["distinct", "composition"]


@pytest.mark.parametrize("missing", ["prefix(1)", "full"])
def test_without_the_gap_there_are_no_strata(missing):
    given = sums()
    for readout in ("raw", *PROBES):
        del given.losses[readout, missing]
    assert run(given, unmeasured={missing: "diverged at application 2"}) == ()


def test_without_probes_there_are_no_gains():
    given = sums()
    raw = {key: values for key, values in given.losses.items() if key[0] == "raw"}
    found = run(dataclasses.replace(given, losses=raw))
    assert len(found) == 10
    assert all(s.gains == {} for s in found)


@pytest.mark.parametrize(("tokens", "kept"), [(199, False), (200, True)])
def test_positions_need_200_tokens(tokens, kept):
    thin = TOKENS.copy()
    thin[:, 3] = 0
    thin[:2, 3] = 100, tokens - 100
    assert (("position", "512+") in by_name(run(sums(3, thin)))) is kept


def test_positions_need_two_documents():
    thin = TOKENS.copy()
    thin[:, 3] = 0
    thin[4, 3] = 400
    assert ("position", "512+") not in by_name(run(sums(1, thin)))


def test_documents_of_equal_length_share_a_stratum():
    # 15 documents at the limit of length: the second third would be 5 others and 5 of these.
    limit = sorted(LENGTHS)[15]
    found = by_name(run(dataclasses.replace(sums(), lengths=np.minimum(LENGTHS, limit))))
    assert [found["length", label].documents for label in ("short", "middle")] == [10, 20]
    assert ("length", "long") not in found


def test_documents_may_weigh_alike():
    config = dataclasses.replace(CONFIG, weighting="document")
    given = sums()
    stratum = by_name(run(given, config=config))["position", "64-256"]
    means = [given.losses["raw", name][:, 1] / TOKENS[:, 1] for name in ("prefix(1)", "full")]
    assert stratum.gap.value == pytest.approx((means[0] - means[1]).mean())


def test_position_buckets_take_their_lower_end():
    positions = np.array([1, 63, 64, 255, 256, 511, 512, 9999])
    assert position_buckets(positions).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [BUCKETS[i] for i in position_buckets(np.array([0, 64, 512]))] == ["0-64", "64-256", "512+"]


def test_strata_of_two_kinds_draw_by_themselves():
    # The same documents under another label: other draws, so another interval around the same number.
    given = sums()
    first, second = (
        run(dataclasses.replace(given, lengths=lengths))[3] for lengths in (np.arange(30), np.arange(30)[::-1])
    )
    assert first.label == second.label == "short"
    assert first.gap.value != second.gap.value
    again = by_name(run(dataclasses.replace(given, lengths=np.arange(30))))["length", "short"]
    assert again == first
    mirrored = by_name(run(dataclasses.replace(given, lengths=np.arange(30)[::-1])))["length", "long"]
    assert mirrored.gap.value == pytest.approx(first.gap.value, abs=1e-12)
    assert mirrored.gap.low != first.gap.low


def test_documents_of_one_length_are_no_strata_by_length():
    assert {stratum.by for stratum in run(sums())} == {"loss", "length", "position"}
    equal = dataclasses.replace(sums(), lengths=np.full_like(LENGTHS, 256))
    assert {stratum.by for stratum in run(equal)} == {"loss", "position"}
