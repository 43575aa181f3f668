import json
import typing

import pytest

from looplab.cli import exit_codes, main
from looplab.cli.list import CHOICES, MAIN, Kind, entries
from looplab.interop.adapters import ADAPTERS
from looplab.models.base import MODELS, PRESETS, build
from looplab.models.published import PUBLISHED

KINDS = typing.get_args(Kind)


def listed(capsys, *argv):
    assert main(["list", *argv, "--json"]) == exit_codes.DONE
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_says_what_it_is(kind):
    found = entries(kind)
    assert found
    assert [entry.name for entry in found] == sorted(entry.name for entry in found)
    silent = [entry.name for entry in found if not entry.about]
    assert not silent, f"no docstring: {silent}"


def test_models_and_presets_come_from_the_registries_with_exact_counts(capsys):
    lists = listed(capsys)
    assert tuple(lists) == MAIN
    assert [entry["name"] for entry in lists["models"]] == list(MODELS)
    for entry in lists["presets"]:
        model = build(PRESETS[entry["name"]](), device="meta")
        assert entry["parameters"] == sum(p.numel() for p in model.parameters())
        assert entry["reference"] == model.reference


def test_one_kind_alone(capsys):
    assert list(listed(capsys, "depth-samplers")) == ["depth-samplers"]
    assert set(CHOICES) | set(MAIN) | {"families"} == set(KINDS)


def test_families_say_how_they_are_found(capsys):
    found = {entry["name"]: entry["about"] for entry in listed(capsys, "families")["families"]}
    assert (found["huginn"], found["llama"]) == ("model_type huginn_raven", "model_type llama")
    assert found["trm"] == "found by its tensors"
    assert {*PUBLISHED, *ADAPTERS} == set(found)


def test_tables_show_names_and_counts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["list", "presets"]) == exit_codes.DONE
    text = capsys.readouterr().out
    for entry in entries("presets"):
        assert entry.name in text
        assert f"{entry.parameters:,}" in text


def test_an_unknown_kind_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["list", "modles"])
    assert stopped.value.code == exit_codes.USAGE
    assert "models" in capsys.readouterr().err
