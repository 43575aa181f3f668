import pytest

from looplab._config import config_hash
from looplab.studies import forecast
from looplab.studies.base import STUDIES
from looplab.studies.forecast import RECORD, RUNS, Cost, forecaster, missing, probe


def test_a_probe_is_two_steps_of_the_recipe_times_what_is_left():
    run = STUDIES["par"]().arms("smoke", 1)[0].source
    found = probe(run, seconds=0.0)
    assert 2 < found.applications / (run.steps * run.data.rows) < 9  # 4 to 8 of them per row and step
    assert found.flops > 1e6
    assert found.seconds > 0


@pytest.fixture
def planted(monkeypatch):
    asked = []
    cost = Cost(applications=10.0, flops=100.0, seconds=60.0)
    monkeypatch.setattr(forecast, "probe", lambda run, seconds: asked.append(run) or cost)
    return asked


def test_a_recipe_is_probed_once_for_all_its_seeds(planted):
    study = STUDIES["par"]()
    arms = study.arms("cpu", 3)
    predict = forecaster(study, arms)
    assert [predict(arm) for arm in arms if arm.name == "main"] == [60.0] * 3
    assert len(planted) == 1
    built_in = STUDIES["dcp"]()
    assert forecaster(built_in, built_in.arms("cpu", 0))(built_in.arms("cpu", 0)[0]) == 60 * built_in.minutes / 4


def test_what_is_missing_is_counted_arm_by_arm(planted, tmp_path, monkeypatch):
    study = STUDIES["par"]()
    arms = [arm for arm in study.arms("cpu", 3) if arm.name in ("main", "add")]
    done = {"main-0"}
    monkeypatch.setattr(forecast, "finished_arm", lambda folder, arm, predictions: arm.folder in done or None)
    monkeypatch.setattr(forecast, "memory_line", lambda run, model: "memory 3.1 MB: weights 1 MB")
    found = {each.name: each for each in missing(study, arms, tmp_path, tmp_path, "p")}
    assert (found["main"].jobs, found["add"].jobs) == (2, 3)
    assert (found["add"].applications, found["add"].flops, found["add"].seconds) == (30.0, 300.0, 180.0)
    assert found["add"].memory == "3.1 MB"
    assert len(planted) == 2
    trained = next(arm for arm in arms if arm.folder == "main-1")
    record = tmp_path / RUNS / config_hash(trained.source) / RECORD
    record.parent.mkdir(parents=True)
    record.touch()  # its run is finished, its measures are not
    main = next(each for each in missing(study, arms, tmp_path, tmp_path, "p") if each.name == "main")
    assert (main.jobs, main.trained, main.applications, main.flops, main.seconds) == (2, 1, 10.0, 100.0, 60.0)
