"""Small task files in lm-eval's format, a data cache of the test's own, and a process that cannot reach a network."""

import json
import socket

import pytest
import yaml

LETTERS = ["abcd", "bcde", "cdef", "defg", "efgh", "fgha"]


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No connection can be opened, and the datasets library keeps its files in the test's folder."""
    import datasets

    def refuse(*arguments):
        raise AssertionError(f"a connection was opened: {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def write_task(folder, name="letters_choice", output="multiple_choice", *, group="", **more):
    """A task file with its documents beside it; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = [{"text": text, "choices": [text[::-1], text], "answer": 1} for text in LETTERS]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents), encoding="utf-8")
    settings = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        "output_type": output,
        "doc_to_text": "{{text}}",
        "target_delimiter": "",
        "fewshot_delimiter": "h",
    }
    settings |= {
        "multiple_choice": {"doc_to_choice": "choices", "doc_to_target": "answer"},
        "loglikelihood_rolling": {"doc_to_text": "", "doc_to_target": "{{text}}"},
        "generate_until": {
            "doc_to_target": "{{text[0]}}",
            "generation_kwargs": {"until": ["h"], "max_gen_toks": 3},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
    }[output]
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings | more), encoding="utf-8")
    return folder / f"{name}.yaml"


def write_group(folder, *names):
    """A group over tasks of the folder that reports their mean."""
    settings = {
        "group": "letters_all",
        "task": list(names),
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": False}],
    }
    (folder / "all.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return folder / "all.yaml"
