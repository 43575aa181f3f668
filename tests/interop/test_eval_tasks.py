"""Tasks by name, from files and folders, without a network; what is said where one cannot be had."""

import logging

import pytest
import yaml

from interop.eval_task_files import offline, write_group, write_task  # noqa: F401, a fixture
from looplab.interop.builtin_tasks import NAMES
from looplab.interop.eval_tasks import TaskError, listening, load_tasks

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """lm-eval ships two small tasks instead of its thousands, which take seconds to read."""
    import lm_eval.tasks.manager

    folder = tmp_path / "shipped"
    write_task(folder, "hellaswag", dataset_path="Rowan/hellaswag", dataset_kwargs={})
    write_task(folder, "letters_far", dataset_kwargs={"data_files": {"test": str(folder / "letters_far.jsonl")}})
    monkeypatch.setattr(lm_eval.tasks.manager, "__file__", str(folder / "manager.py"))


def test_the_built_in_tasks_load_without_a_network():
    found = load_tasks(["builtin"])
    assert tuple(found.tasks) == NAMES
    assert set(found.origins.values()) == {"built in"}
    assert [len(task.eval_docs) for task in found.tasks.values()] == [60, 60, 16]
    assert tuple(load_tasks([NAMES[1]]).tasks) == (NAMES[1],)


def test_a_file_finds_the_data_beside_it(tmp_path):
    path = write_task(tmp_path / "mine")
    found = load_tasks([str(path)])
    assert found.origins == {"letters_choice": "local"}
    assert found.tasks["letters_choice"].eval_docs[0]["text"] == "abcd"


def test_a_folder_holds_tasks_and_a_named_one_is_found_in_it(tmp_path):
    write_task(tmp_path / "mine")
    write_task(tmp_path / "mine" / "deeper", "letters_text", "loglikelihood_rolling")
    assert set(load_tasks([str(tmp_path / "mine")]).tasks) == {"letters_choice", "letters_text"}
    found = load_tasks(["letters_text", "builtin"], [tmp_path / "mine"])
    assert tuple(found.tasks) == ("letters_text", *NAMES)
    assert found.origins["letters_text"] == "local"


def test_a_group_brings_its_tasks_and_its_mean(tmp_path):
    write_task(tmp_path, "letters_one")
    write_task(tmp_path, "letters_two")
    write_group(tmp_path, "letters_one", "letters_two")
    found = load_tasks(["letters_all"], [tmp_path])
    assert set(found.tasks) == {"letters_one", "letters_two"}
    assert list(found.groups) == ["letters_all"]


def test_names_may_be_patterns(tmp_path, shipped):
    write_task(tmp_path / "mine", "letters_one")
    found = load_tasks(["letters_*"], [tmp_path / "mine"])
    assert set(found.tasks) == {"letters_one", "letters_far"}
    assert found.origins == {"letters_one": "local", "letters_far": "lm-eval"}


def test_an_unknown_task_is_refused_with_the_nearest(shipped):
    with pytest.raises(
        KeyError, match=r"Unknown task 'helaswag'\. Did you mean 'hellaswag'\? Built in: looplab_next_line"
    ):
        load_tasks(["helaswag"])


def test_a_task_whose_data_lies_on_a_hub_says_how_to_get_it(shipped, monkeypatch):
    import datasets

    def unreachable(*arguments, **options):
        raise ConnectionError("Couldn't reach 'Rowan/hellaswag' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(TaskError) as refused:
        load_tasks(["hellaswag"])
    assert str(refused.value) == (
        "the data of task hellaswag must be readable. Got ConnectionError: Couldn't reach 'Rowan/hellaswag' on the Hub "
        "(OfflineModeIsEnabled). Run it once with a network, which fills the cache of the datasets library, or give a "
        "task file with data files beside it: --tasks FILE.yaml."
    )


def test_what_is_no_task_is_refused(tmp_path):
    with pytest.raises(TaskError, match="no such file. Check the path"):
        load_tasks([str(tmp_path / "none.yaml")])
    with pytest.raises(TaskError, match="--include-path must be a folder of task files"):
        load_tasks(["builtin"], [tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match="must hold task files .* Got an empty folder"):
        load_tasks([str(tmp_path / "empty")])
    (tmp_path / "broken.yaml").write_text("task: [", encoding="utf-8")
    with pytest.raises(TaskError, match="must be a task file of lm-eval. Got: while parsing"):
        load_tasks([str(tmp_path / "broken.yaml")])
    (tmp_path / "nameless.yaml").write_text(yaml.safe_dump({"dataset_path": "json"}), encoding="utf-8")
    with pytest.raises(TaskError, match="Got no `task:` with its name. Add it"):
        load_tasks([str(tmp_path / "nameless.yaml")])


def test_data_that_is_not_there_is_named(tmp_path):
    path = write_task(tmp_path)
    (tmp_path / "letters_choice.jsonl").unlink()
    with pytest.raises(
        TaskError, match=r"the data of task letters_choice must be readable. Got FileNotFoundError.*letters_"
    ):
        load_tasks([str(path)])


def test_what_lm_eval_says_is_collected_once_and_its_bars_are_off(capsys):
    from tqdm import tqdm

    start = tqdm.__init__
    with listening() as heard:
        for _ in range(2):
            logging.getLogger("lm_eval.api.task").warning("something %s", "odd")
        logging.getLogger("lm_eval").info("nothing")
        list(tqdm(range(3)))
    assert heard == ["something odd"]
    assert capsys.readouterr().err == ""
    assert tqdm.__init__ is start
    assert not logging.getLogger("lm_eval").handlers
