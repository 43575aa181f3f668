"""Each self-test passes on an honest model and names itself on a model broken in its one way."""

import dataclasses
import re

import pytest
import torch

from looplab.audit import self_tests
from looplab.audit.documents import prepare
from looplab.audit.positive_controls.progress import SWAPS, TASK, Follower
from looplab.audit.problems import Problems, prepare_problems
from looplab.audit.runner import Runner
from looplab.audit.schedules import full_plan
from looplab.audit.self_tests import NonFiniteError, SelfTestError
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.spec import own_function, same_function
from tiny import LETTERS, LetterTokenizer, Mixing, letters

DOCUMENTS = prepare("text", letters(60), LetterTokenizer()).evaluation.documents


def run(model):
    return self_tests.run(Runner(model.eval()), full_plan(model.spec), DOCUMENTS, Ledger())


@pytest.mark.parametrize(
    "model",
    [
        Mixing(),
        Mixing(dtype=torch.float64),
        Mixing(blocks=1, steps=6, indexed=False),
        Mixing(noise=True),
        Mixing(dtype=torch.bfloat16),
    ],
    ids=["two blocks", "float64", "one core", "noise", "bfloat16"],
)
def test_an_honest_model_passes_all_nine(model):
    tests, findings = run(model)
    assert [test.name for test in tests] == [f"T{i}" for i in range(1, 10)]
    assert all(test.passed for test in tests)
    assert findings == ()


PROBLEMS = prepare_problems("d", Problems(task=TASK, difficulty=SWAPS), evaluation=20, calibration=10)


class PadsCells(Follower):
    """The answer's last cell depends on how many positions its launch has."""

    def coda(self, state, context, cache=None):
        hidden = super().coda(state, context)
        return torch.cat([hidden[..., :-1], hidden[..., -1:] + 0.1 * hidden.shape[1]], dim=-1)


def run_on_problems(model):
    documents = PROBLEMS.evaluation.documents
    return self_tests.run(Runner(model.eval()), full_plan(model.spec), documents, Ledger())


def test_a_model_that_answers_with_cells_passes_all_nine():
    tests, findings = run_on_problems(Follower())
    assert [test.name for test in tests] == [f"T{i}" for i in range(1, 10)]
    assert findings == ()


def test_every_cell_of_an_answer_is_watched_for_padding():
    with pytest.raises(SelfTestError, match="self-test T3 failed: padding changes scored losses"):
        run_on_problems(PadsCells())


class ScaledForward(Mixing):
    """Its head looks at the number of rows, so gathered hidden states get other logits."""

    def head(self, hidden):
        return super().head(hidden) * (1.0 if hidden.shape[0] > 1 else 1.5)


class CountsCalls(Mixing):
    """Every second call of `step` is another function."""

    calls = 0

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        self.calls += 1
        moved = super().step(state, context, block, iteration)
        return moved + 0.01 * (self.calls % 7)


class ReadsPadding(Mixing):
    """Attends to padded positions."""

    def encode(self, tokens, cache=None, *, positions=None, valid=None, extras=None):
        context = super().encode(tokens, cache, positions=positions, valid=valid, extras=extras)
        return context._replace(valid=None, positions=torch.arange(tokens.shape[1]).expand(tokens.shape))


class MixesRows(Mixing):
    """Each row sees the first one."""

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        return super().step(state, context, block, iteration) + 0.1 * state[:1]


class DropsOut(Mixing):
    """Draws a dropout mask in every call of the readout."""

    def coda(self, state, context, cache=None):
        return torch.nn.functional.dropout(state, 0.3, training=self.noisy)

    noisy = False

    def init_state(self, context, noise):
        return super().init_state(context, noise) + 1e-3 * torch.rand(1) * self.noisy


class SeesTheFuture(Mixing):
    """The mean runs over later positions too."""

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        return super().step(state, context, block, iteration) + 0.1 * state.mean(dim=1, keepdim=True)


class Learns(Mixing):
    """Running it changes a weight too small to show anywhere else."""

    def coda(self, state, context, cache=None):
        self.unused.add_(1)
        return state


def declared(model, classes):
    model.spec = dataclasses.replace(model.spec, operator_class=classes)
    return model


def exact_failure(model, name, words):
    with pytest.raises(SelfTestError, match=f"^self-test {name} failed: .*{words}.* No result is printed"):
        run(model)


def test_t1_finds_a_readout_that_is_not_the_head():
    exact_failure(ScaledForward(), "T1", "the head on gathered hidden states differs from the model's logits by")


def test_t2_finds_a_forward_that_is_not_the_plan():
    exact_failure(CountsCalls(), "T2", "rollout differs from the model's forward by")


class WrapsAnother(Mixing):
    """An adapter whose original forward gives other logits than its plan."""

    shift = 0.5

    def native(self, tokens, valid=None):
        context = self.encode(tokens)
        state = self.init_state(context, None)
        for block, iteration in self.spec.plan():
            state = self.step(state, context, block, torch.full((len(tokens),), iteration))
        return self.head(self.coda(state, context)) + self.shift


def test_t2_finds_an_original_forward_that_is_not_the_plan():
    exact_failure(WrapsAnother(), "T2", "rollout differs from the model's forward by")
    honest = WrapsAnother()
    honest.shift = 0.0
    assert all(test.passed for test in run(honest)[0])


def test_t3_stops_at_a_model_that_reads_padding_on_both_sides():
    class LooksRight(Mixing):
        def step(self, state, context, block, iteration, cache=None, *, record=None):
            return super().step(state, context, block, iteration) + 0.01 * state.shape[1]

    exact_failure(LooksRight(), "T3", "padding changes scored losses by")


def test_t3_goes_on_with_a_finding_when_only_left_padding_fails():
    tests, findings = run(ReadsPadding())
    assert len(tests) == 9
    assert [finding.kind for finding in findings] == ["audit.mask_ignored"]
    assert findings[0].value > findings[0].threshold


def test_t4_finds_a_model_whose_rows_see_each_other():
    def mixed(state):
        return torch.cat([state[:1], state[1:] + 0.1 * state[:1, :1]])

    class Crosses(Mixing):
        def coda(self, state, context, cache=None):
            return mixed(state)

    with pytest.raises(SelfTestError, match=r"^self-test T[34] failed"):
        run(Crosses())


def test_t4_stands_on_its_own():
    checks = self_tests.Checks(Runner(MixesRows().eval()), full_plan(Mixing().spec), DOCUMENTS[:4], Ledger())
    with pytest.raises(SelfTestError, match="^self-test T4 failed: a row changes with its batch by"):
        checks.batch_order()


def test_t5_finds_a_model_that_draws_numbers():
    model = DropsOut()
    model.noisy = True
    checks = self_tests.Checks(Runner(model.eval()), full_plan(model.spec), DOCUMENTS[:4], Ledger())
    with pytest.raises(SelfTestError, match="^self-test T5 failed: two equal runs differ by"):
        checks.repeatable()


def test_t6_finds_applications_declared_equal_that_differ():
    exact_failure(declared(Mixing(), same_function), "T6", "applications declared equal differ by")


def test_t6_reports_applications_declared_different_that_are_equal():
    _, findings = run(declared(Mixing(indexed=False), own_function))
    assert [finding.kind for finding in findings] == ["audit.index_inert"]
    assert findings[0].message.startswith(
        "12 pairs of indices are declared different and give the same bits (first: [0.0 0.1])"
    )


def stepped(classes=own_function):
    """Four steps of a step-size-conditioned model; ids 4, 5-6 and 7-9 are the coarser grids of 1, 2 and 3 steps."""
    grids = {1: (4,), 2: (5, 6), 3: (7, 8, 9), 4: (0, 1, 2, 3)}
    model = declared(Mixing(blocks=1, steps=10), classes)
    model.spec = dataclasses.replace(model.spec, order=ModelLoop(num_steps=4), grid=grids.__getitem__)
    return model


@pytest.mark.parametrize("later", [9, 4], ids=["among the coarser", "coarser and trained"])
def test_t6_looks_at_the_iterations_of_coarser_grids_too(later):
    assert all(test.passed for test in run(stepped())[0])
    wrong = {9: 8, 4: 3}[later]
    exact_failure(stepped(lambda block, t: wrong if t == later else t), "T6", "applications declared equal differ by")


def test_t6_reports_coarser_grids_that_have_no_effect():
    model = stepped()
    with torch.no_grad():
        model.index[0, 6] = model.index[0, 5]
    _, findings = run(model)
    assert findings[0].message.startswith(
        "1 pairs of indices are declared different and give the same bits (first: [0.5 0.6])"
    )


def test_t6_takes_the_first_steps_of_all_grids_before_later_ones():
    steps = 12
    model = Mixing(blocks=1, steps=steps)
    first = {k: steps + sum(range(k)) for k in range(1, steps)}
    spec = dataclasses.replace(
        model.spec,
        max_iteration=None,
        grid=lambda k: tuple(range(first[k], first[k] + k)) if k < steps else tuple(range(steps)),
    )
    checks = self_tests.Checks(Runner(model.eval()), full_plan(spec), DOCUMENTS[:4], Ledger())
    found = checks._indices(0)
    assert found[:steps] == list(range(steps)) and len(found) == steps + 16
    assert set(first.values()) < set(found), "a grid of which no step is looked at"


def test_t7_finds_a_model_that_sees_the_future():
    checks = self_tests.Checks(Runner(SeesTheFuture().eval()), full_plan(Mixing().spec), DOCUMENTS[:4], Ledger())
    with pytest.raises(SelfTestError, match="^self-test T7 failed: a later token changes earlier logits by"):
        checks.causality()


def test_t8_finds_a_walk_that_leaves_something_behind():
    class Remembers(Mixing):
        last = 0.0

        def step(self, state, context, block, iteration, cache=None, *, record=None):
            moved = super().step(state, context, block, iteration) + self.last
            self.last = 0.01 * float(block)
            return moved

    checks = self_tests.Checks(Runner(Remembers().eval()), full_plan(Mixing().spec), DOCUMENTS[:4], Ledger())
    with pytest.raises(
        SelfTestError, match="^self-test T8 failed: the shared walk differs from a run from the start by"
    ):
        checks.sharing()


def test_t9_finds_weights_that_change_and_training_mode():
    model = Learns()
    model.register_buffer("unused", torch.zeros(1))
    exact_failure(model, "T9", "running the model changed its weights")
    with pytest.raises(SelfTestError, match=re.escape("T9 failed: Mixing is in training mode")):
        self_tests.run(Runner(Mixing().train()), full_plan(Mixing().spec), DOCUMENTS, Ledger())


def test_logits_that_are_not_finite_are_named_by_document_and_position():
    model = Mixing()
    with torch.no_grad():
        model.embedding[3] = float("nan")
    hit = next(d for d in DOCUMENTS if 3 in d.tokens[: len(d.tokens) - 1])
    position = hit.tokens.tolist().index(3) + 1
    message = (
        f"the full plan gives non-finite logits (first: document {hit.line}, position {position}). Try --dtype float32."
    )
    with pytest.raises(NonFiniteError, match=f"^{re.escape(message)}$"):
        run(model)


def test_the_probe_batch_is_counted_in_its_own_ledger():
    ledger = Ledger()
    self_tests.run(Runner(Mixing().eval()), full_plan(Mixing().spec), DOCUMENTS, ledger)
    assert ledger.row_applications > 0
    assert ledger.head_tokens > 4 * LETTERS
