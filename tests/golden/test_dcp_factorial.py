"""The arithmetic of the factorial and the split on the losses that were published for the public 542.8M checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest

from looplab.audit.bootstrap import ScheduleSums, bootstrap_losses
from looplab.audit.config import AuditConfig
from looplab.audit.decompose import decompositions, identify
from looplab.audit.factorial import factorials
from looplab.audit.four_way import four_ways
from looplab.audit.schedules import FullPlan, default_schedules, schedule_map
from looplab.intervals import document_draws
from looplab.recurrence.plan import Blocks
from looplab.recurrence.spec import own_function

PUBLISHED = json.loads((Path(__file__).parent / "dcp" / "factorial.json").read_text())
NAMES = {
    "same4": "same(4)",
    "prefix4": "prefix(4)",
    "repeat1": "repeat(1)",
    "repeat4": "repeat(4)",
    "rfirst8": "repeat_first(8)",
    "cyclic8": "cyclic(8)",
    "prefix1": "prefix(1)",
    "full": "full",
}
EFFECTS = {
    "conditioning_at_a4": "index effect at 4",
    "conditioning_at_a8": "index effect at 8",
    "application_at_1idx": "count effect at one index",
    "application_at_4idx": "count effect at 4 indices",
    "interaction": "interaction",
    "rfirst8_minus_repeat4": "extra units at the start",
    "cyclic8_minus_repeat4": "extra units in a cycle",
}
ANATOMY = FullPlan.of(Blocks(num_steps=(4, 4)).plan((4, 4), 2), own_function)
ROWS = schedule_map(ANATOMY, default_schedules(ANATOMY))
CONFIG = AuditConfig(replicates=1000)
OPTIONS = {"units": 8, "kmid": 4, "reasons": identify(ROWS, units=8, kmid=4), "unmeasured": {}, "config": CONFIG}


def published_losses():
    """Documents of one token each whose losses are the published means."""
    tokens = np.ones(20)
    tables = {
        ours: ScheduleSums(
            raw=tokens * PUBLISHED["raw"]["nll"][theirs], fixed={"T": tokens * PUBLISHED["T"]["nll"][theirs]}
        )
        for theirs, ours in NAMES.items()
    }
    draws = document_draws(20, CONFIG.replicates, seed=0, domain="math", split="evaluation")
    return bootstrap_losses(tables, draws, tokens=tokens)


@pytest.fixture(scope="module")
def squares():
    found, reason = factorials(published_losses(), ROWS, **OPTIONS)
    assert reason is None
    return {square.probe: square for square in found}


@pytest.mark.parametrize("readout", ["raw", "T"])
def test_the_effects_are_the_published_ones(squares, readout):
    effects = {effect.name: effect.nats.value for effect in squares[readout].effects}
    for theirs, ours in EFFECTS.items():
        assert effects[ours] == pytest.approx(PUBLISHED[readout]["effects"][theirs], abs=1e-12), ours


def test_the_interaction_and_the_shares_are_the_printed_ones(squares):
    effects = {effect.name: effect.nats.value for effect in squares["raw"].effects}
    assert round(effects["interaction"], 4) == 0.0176
    raw = decompositions(published_losses(), **OPTIONS)[0]
    assert [round(100 * part.share.value, 1) for part in raw.parts] == [35.2, 0.8, 64.0]


def test_index_first_moves_nats_from_count_to_index(squares):
    # 1.9415 - 1.5962 + 1.5708 - 1.5835, 1.5962 - 1.5708, 1.5835 - 0.9458; raw losses, by hand.
    count, index = squares["raw"].orders
    assert [round(e.value, 4) for e in index.terms.values()] == [0.3326, 0.0254, 0.6377]
    assert [round(e.value, 4) for e in count.terms.values()] == [0.3502, 0.0077, 0.6377]


def test_the_four_paths_add_up_to_raw_start_minus_calibrated_end():
    (view,) = four_ways(published_losses(), ROWS, **OPTIONS)
    assert round(view.whole.value, 4) == round(1.9415021 - 0.9274296, 4)
    assert len(view.paths) == 4
    for path in view.paths:
        assert sum(e.value for e in path.terms.values()) == pytest.approx(view.whole.value, abs=1e-12)
    # gain(full) and gain(prefix(1)), by hand.
    assert view.spread["calibration"] == pytest.approx((0.9458110 - 0.9274296, 1.9415021 - 1.7583378), abs=1e-6)
