"""An audit that is cut anywhere goes on and gives the same bytes; a larger one does only what is new."""

import dataclasses

import pytest

from looplab.audit.case import Cases
from looplab.audit.config import AuditConfig
from looplab.audit.protocol import plan_audit
from looplab.audit.watch import Silent
from looplab.executors import LocalPool
from looplab.journal import Journal
from tiny import LetterTokenizer, Mixing, TinyDense, letters

CONFIG = AuditConfig(replicates=1000, grid=(1, 2), controls=("suffix",), affine_tokens=400, init_seeds=2)


def plan_of(config=CONFIG, domains=("text",), control=True):
    sets = {name: letters(60, seed=i) for i, name in enumerate(domains)}
    return plan_audit(
        Mixing(noise=True).eval(),
        sets,
        config,
        tokenizer=LetterTokenizer(),
        control=TinyDense(3).eval() if control else None,
        batch_tokens=800,
    )


def made_again():
    return plan_of().cases


class Cut(Exception):
    pass


class FailingJournal(Journal):
    """Stops after some parts, before or after the last of them is there."""

    def __init__(self, root, parts, after):
        super().__init__(root)
        self.parts, self.after = parts, after

    def put(self, key, part):
        self.parts -= 1
        if self.parts <= 0 and not self.after:
            raise Cut
        super().put(key, part)
        if self.parts <= 0:
            raise Cut


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    journal = Journal(tmp_path_factory.mktemp("whole"))
    found = plan_of().measure(journal)
    return found.result("command").to_json(), found.ran


@pytest.mark.parametrize("steps", [*(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 7)), 23])
def test_an_audit_cut_again_and_again_gives_the_same_bytes(whole, tmp_path, steps):
    """The first run is cut after `steps` parts, the next after as many more, until nothing is left to do."""
    for attempt in range(400):
        try:
            found = plan_of().measure(FailingJournal(tmp_path, steps, after=attempt % 2 == 0 or steps == 1))
            break
        except Cut:
            pass
    assert attempt > 2
    assert found.result("command").to_json() == whole[0]


def test_a_probe_fitted_to_the_full_depth_survives_being_cut(tmp_path):
    """The full plan's hidden states are the target of all other fits, so they outlive their own."""
    config = dataclasses.replace(CONFIG, probes=("full_rank",), objective="kl", controls=(), init_seeds=1)
    expected = plan_of(config, control=False).run(command="command")
    for attempt in range(200):
        try:
            found = plan_of(config, control=False).measure(FailingJournal(tmp_path, 5, after=attempt % 2 == 0))
            break
        except Cut:
            pass
    assert found.result("command").to_json() == expected.to_json()
    left = [path for path in Journal(tmp_path).files() if {"calibration", "training"} & set(path.parts)]
    assert left == []
    fits = {row.name: row.full_rank for row in expected.domains[0].schedules}
    assert fits["full"].penalty is None
    assert {fit.objective for fit in fits.values()} == {"kl"}


def test_counts_of_the_result_are_those_of_an_uninterrupted_run(whole):
    result = plan_of().run(command="command")
    assert result.to_json() == whole[0]
    own = {phase.phase: phase for phase in result.counts.phases}
    ran = whole[1]
    for phase in ("calibrate", "evaluate", "control"):
        assert own[phase].applications == ran[phase].row_applications
        assert own[phase].readouts == ran[phase].readouts
        assert own[phase].head_tokens == ran[phase].head_tokens
        assert own[phase].flops == ran[phase].flops_forward + ran[phase].flops_backward
    assert own["fit"].head_tokens == ran["fit"].head_tokens
    plan = plan_of()
    documents = len(plan.domains["text"].evaluation.documents) + len(plan.domains["text"].calibration.documents)
    assert result.counts.applications == plan.subject.minimal * documents * 2


def test_a_finished_measurement_is_only_read(whole, tmp_path, monkeypatch):
    plan_of().measure(Journal(tmp_path))
    monkeypatch.setattr("looplab.audit.measure.walk", None)
    again = plan_of().measure(Journal(tmp_path))
    assert again.result("command").to_json() == whole[0]


@pytest.mark.nightly
def test_hidden_states_are_dropped_after_their_fit_unless_they_are_wanted(tmp_path):
    plan_of().measure(Journal(tmp_path / "a"))
    plan_of().measure(Journal(tmp_path / "b"), keep_hidden=True)
    kept = [[path for path in Journal(tmp_path / n).files() if "calibration" in path.parts] for n in "ab"]
    assert kept[0] == []
    assert len(kept[1]) > 0


def test_a_further_schedule_is_walked_alone_and_the_result_is_that_of_all_at_once(tmp_path):
    more = dataclasses.replace(CONFIG, schedules=("same(3)",))
    plan_of(control=False).measure(Journal(tmp_path))
    added = plan_of(more, control=False).measure(Journal(tmp_path))
    plan = plan_of(more, control=False)
    split = plan.domains["text"]
    calibrated, evaluated = (2 * len(side.documents) for side in (split.calibration, split.evaluation))
    assert added.ran["calibrate"].row_applications == 3 * calibrated
    assert added.ran["fit"].head_tokens < 0.5 * plan.run().counts.phases[2].head_tokens
    full = len(plan.subject.full.plan)  # again for KL; it shares its first application with same(3)
    assert added.ran["evaluate"].row_applications == (3 + full - 1) * evaluated
    assert added.result("command").to_json() == plan_of(more, control=False).run(command="command").to_json()


@pytest.mark.nightly
def test_a_further_domain_leaves_the_first_one_alone_but_for_cross_temperatures(tmp_path):
    plan_of(control=False).measure(Journal(tmp_path))
    both = plan_of(domains=("text", "web"), control=False)
    added = both.measure(Journal(tmp_path))
    text, web = both.domains["text"], both.domains["web"]
    assert added.ran["calibrate"].row_applications == both.subject.minimal * 2 * len(web.calibration.documents)
    chain = len(both.subject.full.plan) * 2 * len(text.evaluation.documents)
    own = both.subject.minimal * 2 * len(web.evaluation.documents)
    assert added.ran["evaluate"].row_applications == own + chain
    at_once = plan_of(domains=("text", "web"), control=False).run(command="command")
    assert added.result("command").to_json() == at_once.to_json()
    assert at_once.domain("text").schedule("full").temperature.cross.keys() == {"web"}


@pytest.mark.slow
def test_worker_processes_give_the_same_bytes(whole, tmp_path):
    found = plan_of().measure(Journal(tmp_path), executor=LocalPool(2, threads=1), make=made_again)
    assert found.result("command").to_json() == whole[0]


def test_cases_that_cannot_be_made_again_are_not_sent(tmp_path):
    with pytest.raises(ValueError, match="several workers need a way to open the model"):
        Cases(None, plan_of().cases).__reduce__()


def test_progress_ends_at_the_exact_total(tmp_path):
    class Notes(Silent):
        def __init__(self):
            self.told = []

        def advanced(self, phase, domain, done, total, schedule):
            self.told.append((phase, done, total))

    notes = Notes()
    plan = plan_of(control=False)
    plan.measure(Journal(tmp_path), watcher=notes)
    split = plan.domains["text"]
    for phase, documents in (("calibrate", split.calibration.documents), ("evaluate", split.evaluation.documents)):
        told = [(done, total) for p, done, total in notes.told if p == phase]
        assert {total for _, total in told} == {plan.subject.minimal * len(documents) * 2}
        assert told[0][0] == 0
        assert told[-1][0] == told[-1][1]
        assert [done for done, _ in told] == sorted(done for done, _ in told)
    fits = [(done, total) for p, done, total in notes.told if p == "fit"]
    assert fits[-1] == (len(plan.subject.words),) * 2
