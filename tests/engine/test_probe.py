import pytest

from looplab.engine.bound import LaunchCost
from looplab.engine.config import EngineConfig
from looplab.engine.cost_model import CostRunner, DepthLaw
from looplab.engine.probe import predict, probe_launches
from looplab.engine.stages import Facts

FACTS = Facts(blocks=1, max_steps=(4,), whole=False, pages=20, page_tokens=16, max_tokens=64, depth_causal=True)


def test_costs_of_a_known_machine_are_found_and_its_seats_are_free_again():
    core, coda = LaunchCost(per_row=0.5, rows=21.0), LaunchCost(per_row=0.1, rows=40.0)
    runner = CostRunner(FACTS, core=core, coda=coda)
    found = probe_launches(runner, 16, clock=lambda: runner.now)
    for cost, wanted in zip(found, (core, coda), strict=True):
        assert (cost.per_row, cost.rows) == (pytest.approx(wanted.per_row), pytest.approx(wanted.rows))
    assert runner.opened == 16 and runner._jobs == {}
    assert runner.launches == {"core": 8, "coda": 8}


def test_the_fastest_launch_counts():
    runner = CostRunner(FACTS, core=LaunchCost(per_row=0.5, rows=21.0), coda=LaunchCost(per_row=0.1, rows=40.0))
    noise = iter([0.0, 0.0, 0.0, 3.0, 0.0, 2.0] * 10)

    def clock():
        runner.now += next(noise)
        return runner.now

    core, _ = probe_launches(runner, 16, clock=clock)
    assert core.rows == pytest.approx(21.0)


@pytest.mark.parametrize("width", [1, 20])
def test_a_width_without_two_sizes_or_pages_is_refused(width):
    runner = CostRunner(FACTS, core=LaunchCost(per_row=0.5, rows=21.0), coda=LaunchCost(per_row=0.1, rows=40.0))
    with pytest.raises(ValueError, match=f"width must be from 2 to the pages that can be handed out, 19. Got {width}"):
        probe_launches(runner, width)


def predicted(coda_rows=None, **options):
    runner = CostRunner(FACTS, core=LaunchCost(per_row=0.5, rows=21.0), coda=LaunchCost(per_row=0.1, rows=40.0))
    law, config = DepthLaw(chances=(0.25,) * 4), EngineConfig(**{"launch_rows": 4, "max_resident": 6} | options)
    return predict(runner, config, law, "if so", coda_rows=coda_rows, clock=lambda: runner.now)


def test_a_prediction_is_of_the_rows_that_are_given_or_of_the_best():
    thin, best = predicted(coda_rows=1), predicted()
    assert (thin.coda_rows, thin.depths) == (1, "if so")
    assert best.coda_rows > 1 and thin.realised < best.realised <= 1.01


def test_nothing_is_predicted_of_launches_that_cannot_be_compared():
    assert predicted(launch_rows=1) is None and predicted(launch_rows=20, max_resident=20) is None
