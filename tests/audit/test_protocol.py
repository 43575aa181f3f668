"""The audit end to end on models whose answer is known beforehand."""

import dataclasses
import re

import pytest
import torch

import tolerances
from looplab.audit.case import EVALUATION, MODEL
from looplab.audit.measure import walk_shard
from looplab.audit.protocol import AuditConfig, AuditResult, CannotAudit, audit_model, plan_audit
from looplab.audit.result import DENSE_MESSAGE, RAW
from looplab.audit.self_tests import NonFiniteError, SelfTestError
from looplab.data.documents import DataError
from looplab.recurrence.plan import ModelLoop, Plan
from tiny import LETTERS, LetterTokenizer, Mixing, Planted, TinyDense, letters, tiny_spec

QUICK = AuditConfig(replicates=1000, probes=("temperature",), grid=(2,), controls=())
BARE = AuditConfig(replicates=1000, probes=())
SMALL = dataclasses.replace(BARE, grid=(2,), controls=())


def audit(model, config=QUICK, documents=None, **more):
    return audit_model(model.eval(), documents or letters(90), config, tokenizer=LetterTokenizer(), **more)


def exactly(message):
    return f"^{re.escape(message)}$"


def part(result, name, probe=RAW):
    return result.domains[0].decomposition(probe).part(name)


def identity_after_the_first(state, truth, block, iteration):
    """P4: block 0 is idempotent at iteration 0 and the identity after it; block 1 carries the rest."""
    if block == 1:
        return truth.clone()
    return torch.where(iteration == 0, 0.4 * truth, state)


def towards_the_truth(state, truth, block, iteration):
    """The same map at every iteration."""
    return state + 0.4 * (truth - state)


@pytest.fixture(scope="module")
def identity():
    return audit(Planted(identity_after_the_first, steps=(4, 4)))


@pytest.fixture(scope="module")
def index_free():
    return audit(
        Planted(towards_the_truth, steps=8, indexed=False), dataclasses.replace(QUICK, grid=None, controls=None)
    )


@pytest.fixture(scope="module")
def count_only():
    return audit(Planted(towards_the_truth, steps=8))


@pytest.fixture(scope="module")
def mixed():
    return audit(Mixing(dtype=torch.float64), BARE)


@pytest.fixture(scope="module")
def controlled():
    return audit(Mixing(), control=TinyDense(3))


def test_p4_identity_iterations_add_nothing_and_composition_is_everything(identity):
    for probe in (RAW, "temperature"):
        for name in ("application", "distinct"):
            assert part(identity, name, probe).nats.value == 0.0
            assert part(identity, name, probe).bitwise_equal
    composition = part(identity, "composition")
    assert composition.share.value == 1.0
    assert composition.word == "dominant"
    assert part(identity, "application").word.startswith("negligible")


def test_p5_on_an_index_free_core_three_parts_are_not_identifiable(index_free):
    words = {p.name: p.word for p in index_free.decomposition.parts}
    assert words == {
        "application": "not identifiable (takes the whole gap by construction)",
        "distinct": "not identifiable (the block has no iteration index)",
        "composition": "not identifiable (only one kind of unit)",
    }
    assert index_free.decomposition.gap.low > 0.1


def test_p5_nothing_trivial_gets_a_number_anywhere(index_free):
    for decomposition in index_free.domains[0].decompositions:
        for entry in decomposition.parts:
            assert entry.nats is None
            assert entry.share is None
    for contrast in index_free.domains[0].contrasts:
        if contrast.family != "prefix-full":
            assert contrast.effect is None, contrast.name
            assert contrast.reason.startswith("not identifiable: ")
    ran = {schedule.name for schedule in index_free.domains[0].schedules}
    assert ran == {"full", *(f"prefix({k})" for k in range(1, 8))}
    assert index_free.counts.minimal_applications == 8


def test_p5_says_so_in_its_findings(index_free):
    found = [f for f in index_free.findings if f.kind == "audit.not_identifiable"]
    assert {f.where["reason"] for f in found} >= {
        "takes the whole gap by construction",
        "the block has no iteration index",
        "only one kind of unit",
    }
    assert all(f.level == "unidentified" for f in found)


def test_p6_an_inert_index_gives_distinct_zero_and_application_everything(count_only):
    distinct = part(count_only, "distinct")
    assert distinct.nats.value == 0.0
    assert distinct.bitwise_equal
    assert part(count_only, "application").share.value == 1.0
    assert part(count_only, "composition").word == "not identifiable (only one kind of unit)"
    assert "audit.index_inert" in [f.kind for f in count_only.findings]


@pytest.mark.parametrize("planted", [0.5, 2.5])
def test_p1_a_readout_that_is_only_scaled_is_wholly_a_matter_of_temperature(planted):
    def scaled(state, truth, block, iteration):
        return truth * torch.where(iteration == 3, 1.0, 1 / planted)

    result = audit(Planted(scaled, steps=4))
    gain = next(g for g in result.domains[0].gains if g.k == 1)
    assert gain.share.value == pytest.approx(1.0, abs=0.01)
    assert gain.word == "present"
    fitted = [result.domains[0].schedule(name).temperature.temperature for name in ("prefix(1)", "full")]
    assert fitted[0] * planted == pytest.approx(fitted[1], rel=1e-4)


def test_every_loss_equals_the_schedule_run_alone_document_by_document(mixed):
    model = Mixing(dtype=torch.float64).eval()
    documents = plan_audit(model, letters(90), QUICK, tokenizer=LetterTokenizer()).domains["text"].evaluation.documents
    plans = {row.name: Plan.parse(row.plan) for row in mixed.schedule_map if row.reason is None}
    assert len(plans) == mixed.counts.readouts
    for name, plan in plans.items():
        total = 0.0
        for document in documents:
            tokens = torch.from_numpy(document.tokens).long()[None]
            with torch.no_grad():
                context = model.encode(tokens)
                state = model.init_state(context, None)
                for block, iteration in plan:
                    state = model.step(state, context, block, torch.tensor([iteration]))
                logits = model.head(model.coda(state, context))[0]
            total += float(torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="sum"))
        alone = total / sum(document.scored for document in documents)
        assert mixed.domains[0].schedule(name).loss().loss.value == pytest.approx(alone, rel=1e-11), name


def test_parts_add_up_to_the_gap(controlled):
    for decomposition in controlled.domains[0].decompositions:
        total = sum(p.nats.value for p in decomposition.parts)
        assert total == pytest.approx(decomposition.gap.value, abs=1e-12)


def test_applications_are_those_of_the_trie(controlled):
    counts = controlled.counts
    assert counts.applications == counts.minimal_applications * counts.documents * counts.seeds
    documents = controlled.domains[0].documents
    assert counts.documents == documents.evaluation + documents.calibration
    phases = {phase.phase: phase for phase in counts.phases}
    assert phases["calibrate"].applications + phases["evaluate"].applications == counts.applications
    assert phases["evaluate"].readouts == counts.readouts * documents.evaluation
    assert set(phases) == {"self-test", "calibrate", "fit", "evaluate", "control"}


def test_two_by_four_on_the_full_grid_costs_sixty_four():
    result = audit(Mixing(), dataclasses.replace(BARE, controls=("suffix",)))
    assert (result.counts.minimal_applications, result.counts.naive_applications) == (64, 120)
    assert (result.counts.readouts, result.counts.live_states) == (22, 2)
    assert result.counts.applications == 64 * result.domains[0].documents.evaluation


def test_a_depth_sweep_of_one_core_of_thirty_two_costs_thirty_two():
    grid = tuple(range(1, 33))
    result = audit(Mixing(blocks=1, steps=32, indexed=False), dataclasses.replace(BARE, grid=grid))
    assert result.counts.applications == 32 * result.domains[0].documents.evaluation


def test_equal_input_gives_equal_bytes(identity):
    again = audit(Planted(identity_after_the_first, steps=(4, 4)))
    assert again.to_json() == identity.to_json()


@pytest.mark.parametrize("fixture", ["identity", "index_free", "controlled"])
def test_a_result_survives_json(fixture, request, tmp_path):
    result = request.getfixturevalue(fixture)
    result.save(tmp_path)
    assert AuditResult.load(tmp_path) == result


def test_batch_size_changes_nothing_but_rounding(controlled):
    other = audit(Mixing(), batch_tokens=300)
    for schedule in other.domains[0].schedules:
        expected = controlled.domains[0].schedule(schedule.name)
        for readout in (RAW, "temperature"):
            assert schedule.loss(readout).loss.value == pytest.approx(
                expected.loss(readout).loss.value, rel=tolerances.BATCHED32["rtol"]
            )


def test_hidden_states_in_files_give_the_same_bytes(identity):
    plan = plan_audit(
        Planted(identity_after_the_first, steps=(4, 4)).eval(), letters(90), QUICK, tokenizer=LetterTokenizer()
    )
    assert plan.run(spool_bytes=0).to_json() == identity.to_json()


def test_noise_is_averaged_over_its_seeds():
    result = audit(Mixing(noise=True), SMALL)
    loss = result.domains[0].schedule("prefix(1)").loss()
    assert len(set(loss.seeds)) == 3
    assert loss.loss.value == pytest.approx(sum(loss.seeds) / 3, rel=1e-12)
    assert result.counts.seeds == 3
    one = audit(Mixing(noise=True), dataclasses.replace(SMALL, init_seeds=1))
    assert one.domains[0].schedule("prefix(1)").loss().seeds == (pytest.approx(loss.seeds[0], rel=1e-6),)
    assert one.counts.seeds == 1


def test_zero_noise_is_one_start():
    result = audit(Mixing(noise=True), dataclasses.replace(SMALL, init="zero"))
    plain = audit(Mixing(), SMALL)
    assert result.counts.seeds == 1
    assert result.domains[0].schedule("full").loss().loss.value == plain.domains[0].schedule("full").loss().loss.value


def test_a_dense_model_gets_contrasts_and_no_shares():
    result = audit(TinyDense(8), BARE)
    assert result.model.dense
    assert result.domains[0].decompositions == ()
    assert result.domains[0].verdict.sentence == DENSE_MESSAGE
    assert [row.name for row in result.schedule_map] == [
        "full", *(f"{family}({k})" for family in ("prefix", "suffix", "repeat") for k in (2, 4, 6, 7))
    ]  # fmt: skip
    assert all(contrast.effect is not None for contrast in result.domains[0].contrasts)
    assert DENSE_MESSAGE in str(result)


def test_the_control_is_compared_on_the_same_documents(controlled):
    control = controlled.domains[0].control
    assert control.model.dense
    assert {comparison.at for comparison in control.comparisons} == {"smallest k", "nearest gap"}
    assert controlled.domains[0].verdict.recurrence in ("supported", "not supported", "not measured")
    assert set(control.gaps_per_byte) == {f"prefix({k})" for k in (1, 2)}


def test_without_a_control_specificity_is_not_measured(identity):
    assert identity.domains[0].control is None
    assert identity.domains[0].verdict.recurrence == "not measured"


def test_two_domains_are_never_pooled_and_score_each_others_temperature():
    sets = {"one": letters(90), "two": letters(90, seed=1, chain=torch.full((LETTERS, LETTERS), 1 / LETTERS).log())}
    result = audit(Planted(identity_after_the_first, steps=(4, 4)), documents=sets)
    one, two = (result.domain(name).schedule("full") for name in ("one", "two"))
    assert one.temperature.cross.keys() == {"two"}
    assert one.temperature.cross["two"] > one.loss("temperature").loss.value
    assert two.temperature.beta < one.temperature.beta
    parts = {agreement.part for agreement in result.agreements}
    assert parts == {"application", "distinct", "composition", "readout"}
    assert result.agreements != ()


def test_a_diverging_schedule_is_named_and_not_measured():
    def explodes(state, truth, block, iteration):
        moved = torch.where(iteration == 0, truth, state * 1.0)
        return torch.where((iteration == 1) & (state.abs().max() == 0), torch.full_like(truth, float("inf")), moved)

    result = audit(Planted(explodes, steps=4), dataclasses.replace(QUICK, schedules=("[0.0 0.1]", "[0.1 0.2]")))
    broken = result.domains[0].schedule("[0.1 0.2]")
    assert broken.diverged_at == 0
    assert broken.losses == ()
    contrast = next(c for c in result.domains[0].contrasts if c.plus == "[0.1 0.2]")
    assert contrast.effect is None
    assert contrast.reason == "not measured: diverged at application 0"
    assert "audit.diverged" in [f.kind for f in result.findings]


def test_a_full_plan_that_is_not_finite_stops_the_audit():
    model = Planted(lambda state, truth, block, iteration: truth / 0.0)
    with pytest.raises(
        NonFiniteError, match=r"^the full plan gives non-finite logits \(first: document \d+, position 1\)"
    ):
        audit(model)


def test_a_failed_self_test_stops_the_audit():
    model = Planted(lambda state, truth, block, iteration: truth * (1.0 + iteration), indexed=False)
    with pytest.raises(SelfTestError, match="^self-test T6 failed"):
        audit(model)


def test_one_application_is_refused():
    model = Planted(towards_the_truth, steps=1)
    message = "the full plan must have at least 2 applications. Got 1. Pass --num-steps 2 or more."
    with pytest.raises(CannotAudit, match=exactly(message)):
        audit(model)


def test_num_steps_replaces_the_default_plan():
    result = audit(Planted(towards_the_truth, steps=1, indexed=False), dataclasses.replace(SMALL, num_steps=(3,)))
    assert result.model.applications == 3


def test_indices_without_parameters_are_refused():
    message = (
        "--num-steps 12 needs iteration indices 4..11, but the model has 4. Use --extend 24 to reuse trained indices."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        audit(Mixing(), dataclasses.replace(BARE, num_steps=(12,)))


def test_documents_longer_than_the_trained_context_are_refused():
    with pytest.raises(ValueError, match=exactly("--max-tokens must be at most 256, the trained context. Got 300.")):
        audit(Mixing(), dataclasses.replace(BARE, max_tokens=300))


def test_a_model_without_a_tokenizer_is_read_as_bytes_if_it_can_be():
    small = Planted(towards_the_truth).eval()
    message = (
        "a model without a tokenizer needs a vocabulary of at least 256 to be read as bytes. Got 8. "
        "Pass --tokenizer PATH."
    )
    with pytest.raises(CannotAudit, match=exactly(message)):
        audit_model(small, letters(90), BARE)
    wide = Planted(towards_the_truth).eval()
    wide.chain = torch.nn.Parameter(
        torch.log_softmax(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)), 1)
    )
    wide.spec = tiny_spec(ModelLoop(num_steps=8), 1, 256, vocab=(256, 256))
    result = audit_model(wide, [document.text for document in letters(90).documents], SMALL)
    assert "audit.byte_tokens" in [f.kind for f in result.findings]
    assert result.domains[0].documents.source == "given texts"


def test_a_looped_model_is_no_control():
    with pytest.raises(CannotAudit, match=r"^--control must be a dense model of at least 2 layers. Got tiny"):
        audit(Mixing(), control=Mixing())


def test_calibration_for_a_domain_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=exactly("--calibration must name a domain of --data (text). Got 'math'.")):
        audit(Mixing(), calibration={"math": letters(30, seed=2)})


def test_calibration_documents_may_come_from_elsewhere():
    result = audit(Mixing(), SMALL, calibration={"text": letters(30, seed=2)})
    assert (result.domains[0].documents.evaluation, result.domains[0].documents.calibration) == (90, 30)


def test_too_few_documents_are_refused():
    with pytest.raises(DataError, match="^domain text needs 20 evaluation and 10 calibration documents"):
        audit(Mixing(), documents=letters(20))


def test_the_identity_of_a_plan_changes_with_data_and_weights():
    def made(model, documents):
        return plan_audit(model.eval(), documents, BARE, tokenizer=LetterTokenizer()).identity

    assert made(Mixing(), letters(90)) == made(Mixing(), letters(90))
    assert made(Mixing(seed=1), letters(90))["model"] != made(Mixing(), letters(90))["model"]
    assert made(Mixing(), letters(91))["data.text"] != made(Mixing(), letters(90))["data.text"]


def test_a_walk_visits_every_word_once():
    plan = plan_audit(Mixing().eval(), letters(90), BARE, tokenizer=LetterTokenizer())
    case = plan.cases[MODEL, "text"]
    shard = next(iter(case.shards(EVALUATION).values()))
    seen = []
    walk_shard(case.subject, shard, case.subject.tree(), lambda name, hidden, state: seen.append(name))
    assert sorted(seen) == sorted(plan.subject.words)
