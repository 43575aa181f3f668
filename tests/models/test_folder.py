import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from looplab.models.base import PRESETS, build
from looplab.models.folder import load_folder, load_tensors, read_config, save_folder, unique_tensors
from tolerances import EXACT


@pytest.fixture
def folder(tmp_path):
    """A saved tiny model."""
    save_folder(tmp_path / "m", build(PRESETS["tiny-blocks"](), seed=3), trained={"steps": 7})
    return tmp_path / "m"


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", [n for n in PRESETS if n.startswith("tiny-")])
def test_every_model_comes_back_to_the_bit(tmp_path, name):
    model = build(PRESETS[name](), seed=3)
    save_folder(tmp_path, model)
    again, facts = load_folder(tmp_path)
    assert again.config == model.config
    assert facts["tokenizer"] == "bytes"
    assert not again.training
    torch.testing.assert_close(again.state_dict(), model.state_dict(), **EXACT)


def test_it_says_what_it_holds(folder):
    facts = read_config(folder)
    assert (facts["format"], facts["schema"], facts["model"], facts["trained"]) == (
        "looplab",
        1,
        "looped",
        {"steps": 7},
    )
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_equal_models_are_equal_files(folder, tmp_path):
    save_folder(tmp_path / "again", build(PRESETS["tiny-blocks"](), seed=3), trained={"steps": 7})
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_tied_tensor_is_listed_once_under_its_first_name():
    net = nn.Module()
    net.embedding = nn.Embedding(3, 2)
    net.head = nn.Linear(2, 3, bias=False)
    assert list(unique_tensors(net)) == ["embedding.weight", "head.weight"]
    net.head.weight = net.embedding.weight
    assert list(unique_tensors(net)) == ["embedding.weight"]
    load_tensors(net, {"embedding.weight": torch.ones(3, 2)})
    torch.testing.assert_close(net.head.weight.detach(), torch.ones(3, 2), **EXACT)


def test_every_parameter_is_stored_once(folder):
    model, _ = load_folder(folder)
    stored = load_file(folder / "model.safetensors")
    assert sum(t.numel() for t in stored.values()) == model.spec.params.total


def test_bfloat16_halves_the_file_and_is_read_as_asked(tmp_path):
    model = build(PRESETS["tiny-blocks"](), seed=3)
    save_folder(tmp_path, model, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    again, _ = load_folder(tmp_path)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor.bfloat16().float(), **EXACT)
    assert {p.dtype for p in load_folder(tmp_path, dtype=torch.float64)[0].parameters()} == {torch.float64}


def test_a_tokenizer_is_copied_with_its_special_ids(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    save_folder(tmp_path / "m", build(PRESETS["tiny-core"]()), tokenizer=tmp_path / "t.json", token_ids={"eos": 5})
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"
    facts = read_config(tmp_path / "m")
    assert (facts["tokenizer"], facts["eos_token_id"]) == ("tokenizer.json", 5)


def test_a_folder_without_a_config_names_what_it_has(folder):
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        load_folder(folder)
    assert str(caught.value) == f"load: {folder} has no config.json. Found: model.safetensors"
    with pytest.raises(FileNotFoundError, match="has no config.json. Found: no such folder"):
        load_folder(folder / "missing")


def test_a_folder_without_weights_names_what_it_has(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors. Found: config.json$"):
        load_folder(folder)


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".ckpt"])
def test_pickled_weights_are_not_opened(folder, suffix):
    (folder / "model.safetensors").rename(folder / f"model{suffix}")
    with pytest.raises(ValueError, match="is a pickle") as caught:
        load_folder(folder)
    path = folder / f"model{suffix}"
    message = f"load: {path} is a pickle; looplab does not unpickle. Convert it once: looplab convert {path} OUT"
    assert str(caught.value) == message


def test_tensors_that_do_not_fit_are_listed(folder):
    names = sorted(load_file(folder / "model.safetensors"))

    def edit(tensors):
        for name in names[:2]:
            tensors.pop(name)
        tensors["extra"] = torch.zeros(2)
        tensors[names[3]] = torch.zeros(3, 1)

    shape = list(load_file(folder / "model.safetensors")[names[3]].shape)
    change(folder, edit)
    with pytest.raises(ValueError, match="tensors missing") as caught:
        load_folder(folder)
    assert str(caught.value) == (
        f"load: 2 tensors missing ({names[0]}, ...), 1 unexpected (extra), "
        f"1 of wrong shape ({names[3]}: file [3, 1], model {shape})"
    )


def test_one_fault_alone_is_listed_alone(folder):
    change(folder, lambda tensors: tensors.update(extra=torch.zeros(1)))
    with pytest.raises(ValueError, match=r"^load: 1 tensor unexpected \(extra\)$"):
        load_folder(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(folder, value):
    name = sorted(load_file(folder / "model.safetensors"))[0]

    def edit(tensors):
        tensors[name].view(-1)[:3] = value

    change(folder, edit)
    with pytest.raises(ValueError, match=f"^load: 3 non-finite values in {name}$"):
        load_folder(folder)


@pytest.mark.parametrize("kept", [0.9, 0.02])
def test_a_truncated_file_is_named_with_both_sizes(folder, kept):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(ValueError, match=rf"load: {path} is (truncated \(header says .* file has|no safetensors file)"):
        load_folder(folder)


def test_the_sizes_of_a_truncated_file_are_in_the_message(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    text = rf"header says {len(data) / 1000:.1f} kB, file has {len(data) // 2 / 1000:.1f} kB\). Download it again$"
    with pytest.raises(ValueError, match=text):
        load_folder(folder)


def test_foreign_and_later_formats_are_refused(folder):
    facts = json.loads((folder / "config.json").read_text())
    for edit, message in (
        ({"format": "other"}, 'must have "format": "looplab"'),
        ({"schema": 2}, "has schema 2, this version reads 1"),
    ):
        (folder / "config.json").write_text(json.dumps({**facts, **edit}))
        with pytest.raises(ValueError, match=message):
            load_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_folder(folder)


@pytest.mark.parametrize("key", ["model", "config", "tokenizer"])
def test_a_config_without_its_parts_is_refused(folder, key):
    facts = json.loads((folder / "config.json").read_text())
    del facts[key]
    (folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=f"config.json has no '{key}'. Copy it again"):
        load_folder(folder)


def test_an_unknown_model_or_key_gets_a_suggestion(folder):
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, "model": "lopped"}))
    with pytest.raises(KeyError, match=r"Unknown model 'lopped'. Did you mean 'looped'\?"):
        load_folder(folder)
    (folder / "config.json").write_text(json.dumps({**facts, "config": {**facts["config"], "dimm": 3}}))
    with pytest.raises(KeyError, match=r"Did you mean 'dim'\?"):
        load_folder(folder)


def test_other_tensors_may_stand_for_those_of_the_model(tmp_path):
    model = build(PRESETS["tiny-core"](), seed=3)
    doubled = {name: 2 * tensor for name, tensor in unique_tensors(model).items()}
    save_folder(tmp_path, model, tensors=doubled)
    again, _ = load_folder(tmp_path)
    torch.testing.assert_close(again.state_dict(), {n: 2 * t for n, t in model.state_dict().items()}, **EXACT)
