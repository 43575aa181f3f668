import pytest
import torch

from linear_core import TASK, Line, given, share, words
from looplab.objectives.decoded_change import DecodedChange
from looplab.objectives.terminal_fixed_point import TerminalFixedPoint


def test_it_does_not_see_a_state_that_moves_where_the_readout_is_blind():
    model = Line()
    with torch.no_grad():
        model.readout[:, 2] = 0  # the third channel is never read
    moving = Line()
    with torch.no_grad():
        moving.readout.copy_(model.readout)
        moving.table.copy_(model.table)
        moving.table[:, 2] += 5.0
    found = {
        name: [share(objective, m, words())[1].parts.means()[name] for m in (model, moving)]
        for name, objective in (("decoded_change", DecodedChange()), ("fixed_point", TerminalFixedPoint()))
    }
    assert found["decoded_change"][0] == pytest.approx(found["decoded_change"][1], rel=1e-12)
    assert found["fixed_point"][1] > 1.5 * found["fixed_point"][0]


def test_the_distances_of_several_cells_add():
    labels = words().labels

    class Two(Line):
        def head(self, hidden):
            return super().head(hidden).repeat(1, 1, 2)

    pair = DecodedChange().run(given(Two(), words_of(labels[..., None].repeat(1, 1, 2)))).parts.means()
    single = DecodedChange().run(given(Line(), words())).parts.means()
    assert pair["decoded_change"] == pytest.approx(2 * single["decoded_change"], rel=1e-12)
    assert pair["ce"] == pytest.approx(2 * single["ce"], rel=1e-12)
    assert TASK.cells == 1


def words_of(labels):
    from dataclasses import replace

    return replace(words(), labels=labels)


def test_bad_fields_are_refused():
    with pytest.raises(ValueError, match="DecodedChange.weight must be at least 0. Got -1.0."):
        DecodedChange(weight=-1.0)
