import re

import pytest
import torch

from looplab.recurrence.loop import run_plan
from looplab.recurrence.trace import Recorder
from tiny import Mixing
from tolerances import EXACT


class Recording(Mixing):
    """Records the mean of what each application read."""

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        if record is not None:
            record["read"] = state.mean(dim=-1)
        return super().step(state, context, block, iteration, cache)


def recorded(recorder, steps=3):
    model = Recording(blocks=1, steps=steps)
    context = model.encode(torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]))
    with torch.no_grad():
        end = run_plan(model, model.spec.plan(), context, model.init_state(context, None), recorder=recorder)
    return model, context, end


def test_a_trace_of_k_applications_has_k_plus_1_states():
    recorder = Recorder()
    model, context, end = recorded(recorder)
    assert len(recorder.states) == 4
    assert recorder.records == []
    torch.testing.assert_close(recorder.states[0], torch.zeros_like(context.embeds), **EXACT)
    torch.testing.assert_close(recorder.states[3], end, **EXACT)
    with torch.no_grad():
        for k in range(3):
            again = model.step(recorder.states[k], context, 0, torch.full((2,), k))
            torch.testing.assert_close(recorder.states[k + 1], again, **EXACT)


def test_records_come_one_per_application_and_without_them_the_model_is_not_asked():
    recorder = Recorder(keep_records=True)
    recorded(recorder)
    assert len(recorder.records) == 3
    for record, state in zip(recorder.records, recorder.states, strict=False):
        torch.testing.assert_close(record["read"], state.mean(dim=-1), **EXACT)


def test_only_what_is_kept_is_counted():
    state, read = 2 * 4 * 12 * 4, 2 * 4 * 4
    for keep_states, keep_records, expected in ((True, False, 4 * state), (False, True, 3 * read), (False, False, 0)):
        recorder = Recorder(keep_states=keep_states, keep_records=keep_records)
        recorded(recorder)
        assert recorder.nbytes == expected
        assert (len(recorder.states), len(recorder.records)) == (4 * keep_states, 3 * keep_records)


def test_a_full_recorder_is_an_error_that_says_what_to_do():
    state = 2 * 4 * 12 * 4
    recorded(Recorder(max_bytes=4 * state))
    with pytest.raises(
        MemoryError,
        match=re.escape(
            f"Recorder.max_bytes is {4 * state - 1}, and {4 * state} bytes would be kept after 3 states. "
            "Raise it, shorten the plan, or set keep_states=False."
        ),
    ):
        recorded(Recorder(max_bytes=4 * state - 1))


def test_a_new_run_forgets_the_last_one():
    recorder = Recorder(keep_records=True)
    recorded(recorder, steps=5)
    recorded(recorder, steps=2)
    assert (len(recorder.states), len(recorder.records)) == (3, 2)
