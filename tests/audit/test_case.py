"""One model on one domain: token tables, shards, and which schedule is the first to need an application."""

import pytest
import torch

from looplab.audit.case import CALIBRATION, MODEL, Case, Cases, Subject, Table, owned
from looplab.audit.config import AuditConfig
from looplab.audit.documents import prepare
from looplab.audit.runner import Runner
from looplab.audit.schedules import default_schedules, full_plan, schedule_map
from looplab.recurrence.ledger import Ledger
from tiny import LetterTokenizer, Mixing, letters

CONFIG = AuditConfig(replicates=1000, probes=("temperature",))


@pytest.fixture(scope="module")
def domain():
    return prepare("text", letters(70), LetterTokenizer())


def case_of(subject, domain, batch_tokens=10_000):
    return Case(role=MODEL, subject=subject, domain=domain, config=CONFIG, batch_tokens=batch_tokens)


def test_rows_of_several_seeds_stand_together_in_their_document(domain):
    split = domain.calibration
    table = Table(split, 3)
    expected = [
        (d, j, p) for d, doc in enumerate(split.documents) for j in range(3) for p in range(doc.first, len(doc.tokens))
    ]
    rows = torch.full((3 * split.tokens, 3), -1)
    places = torch.arange(split.tokens)
    for j in range(3):
        entries = torch.stack([split.owners, torch.full_like(places, j), split.positions], dim=1)
        rows[table.place(places, j)] = entries
    assert [tuple(row) for row in rows.tolist()] == expected
    assert table.owners.tolist() == [d for d, _, _ in expected]
    assert table.targets.tolist() == [int(split.documents[d].tokens[p]) for d, _, p in expected]


def test_what_schedules_own_adds_up_to_the_walk_however_it_is_cut(domain):
    full = full_plan(Mixing().spec)
    subject = Subject(Runner(Mixing().eval()), full, schedule_map(full, default_schedules(full)), 1)
    case = case_of(subject, domain)
    shard = next(iter(case.shards(CALIBRATION).values()))
    names = tuple(subject.words)
    for cut in range(len(names) + 1):
        total = Ledger()
        for wanted, done in ((names[:cut], ()), (names[cut:], names[:cut])):
            for ledger in owned(subject, shard, wanted, done).values():
                total.add(ledger)
        assert total.row_applications == subject.minimal * shard.rows
        assert total.readouts == len(names) * shard.rows
        assert total.encoded_tokens == shard.batch.tokens.numel()


def test_shards_are_the_launches_under_every_noise_seed(domain):
    full = full_plan(Mixing().spec)
    subject = Subject(Runner(Mixing().eval()), full, schedule_map(full, default_schedules(full)), 2)
    shards = case_of(subject, domain, 300).shards(CALIBRATION)
    assert list(shards) == sorted(shards)
    assert [shard.noise_seed for shard in shards.values()] == [0, 1] * (len(shards) // 2)
    rows = [row.key for shard in shards.values() if shard.noise_seed == 0 for row in shard.batch.documents]
    assert sorted(rows) == sorted(document.key for document in domain.calibration.documents)


def test_cases_are_made_once_where_they_are_needed(domain):
    full = full_plan(Mixing().spec)
    case = case_of(Subject(Runner(Mixing()), full, schedule_map(full, default_schedules(full)), 1), domain)
    calls = []

    def make():
        calls.append(1)
        return {(MODEL, "text"): case}

    cases = Cases(make)
    assert cases[MODEL, "text"] is cases[MODEL, "text"] is case
    assert len(calls) == 1
    assert cases.__reduce__() == (Cases, (make,))
