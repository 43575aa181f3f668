"""Pickles of tensors: what is read, what is written, what is refused and how."""

import argparse
import collections
import hashlib
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from looplab.interop import load
from looplab.interop.convert import convert
from source import ROOT
from tolerances import EXACT

HUGINN = ROOT / "tests" / "golden" / "huginn" / "full"


def weights():
    return load_file(HUGINN / "weights.safetensors")


def pickled(tmp_path, content, name="model.pt", **options):
    folder = tmp_path / "source"
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / name, **options)
    return folder / name


def refused(kind, file, out, *texts, **options):
    with pytest.raises(kind) as caught:
        convert(file, out, **options)
    message = str(caught.value)
    assert message.startswith("convert: ")
    for text in texts:
        assert text in message, message
    assert not out.exists() or kind is FileExistsError
    return message


class Unsafe:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Bundle:
    """A type that other code may have declared safe."""


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "step_100"])
def test_a_converted_checkpoint_opens_as_the_original(tmp_path, archive, name):
    file = pickled(tmp_path, weights(), name, _use_new_zipfile_serialization=archive)
    shutil.copyfile(HUGINN / "config.json", file.parent / "config.json")
    manifest = convert(file, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "convert.json",
        "model.safetensors",
    ]
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), weights(), **EXACT)
    opened = load(tmp_path / "out")
    torch.testing.assert_close(opened.model.state_dict(), load(HUGINN).model.state_dict(), **EXACT)
    assert json.loads((tmp_path / "out" / "convert.json").read_bytes()) == manifest
    assert (manifest["tensors"], manifest["dtypes"]) == (len(weights()), {"float32": len(weights())})
    assert manifest["bytes"] == sum(t.nbytes for t in weights().values())
    assert manifest["source"] == [{"file": name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}]
    assert (manifest["ties"], manifest["dropped"], manifest["copied"]) == ({}, {}, ["config.json"])


def test_the_manifest_holds_no_path_and_nothing_else_is_left(tmp_path):
    convert(pickled(tmp_path, {"a": torch.ones(2)}), tmp_path / "new" / "out")
    assert str(tmp_path) not in (tmp_path / "new" / "out" / "convert.json").read_text()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_the_same_file_gives_the_same_bytes(tmp_path):
    file = pickled(tmp_path, weights())
    for name in ("one", "two"):
        convert(file, tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_tensors_tied_by_storage_are_written_once_and_equal_ones_are_not_tied(tmp_path):
    table = torch.arange(6.0).view(2, 3)
    content = {"wte": table, "head": torch.nn.Parameter(table), "copy": table.clone(), "transposed": table.T}
    manifest = convert(pickled(tmp_path, content), tmp_path / "out")
    assert manifest["ties"] == {"head": "wte"}
    written = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(written, {"wte": table, "copy": table, "transposed": table.T.contiguous()}, **EXACT)


def test_views_and_gaps_are_copied(tmp_path):
    flat = torch.arange(12.0)
    content = {"first": flat[:4], "second": flat[4:8], "every": flat[::2], "scalar": flat[3], "none": flat[:0]}
    convert(pickled(tmp_path, content), tmp_path / "out")
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), content, **EXACT)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 1000


def test_every_type_of_number_comes_back(tmp_path):
    kinds = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint16)
    content = {str(kind): torch.ones(3).to(kind) for kind in kinds}
    manifest = convert(pickled(tmp_path, content), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: t.dtype for name, t in written.items()} == {str(kind): kind for kind in kinds}
    assert all(torch.equal(written[name].view(torch.uint8), t.view(torch.uint8)) for name, t in content.items())
    assert sum(manifest["dtypes"].values()) == len(kinds) and manifest["dtypes"]["bfloat16"] == 1


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda state: {"model": state, "step": 7}, "model"),
        (lambda state: {"state_dict": collections.OrderedDict(state), "step": torch.tensor(7)}, "state_dict"),
        (lambda state: {"payload": {"module": state}, "step": 7}, "payload.module"),
        (lambda state: {"weights": state, "args": {"lr": 0.1}, "step": 7}, "weights"),
        (lambda state: {"optimizer": {"state": {0: {"exp": torch.ones(2)}}}, "model": state}, "model"),
    ],
)
def test_a_nested_state_dict_is_found_and_told_and_the_rest_named(tmp_path, wrap, path):
    state = {"a.weight": torch.ones(2, 2)}
    manifest = convert(pickled(tmp_path, wrap(state)), tmp_path / "out")
    assert manifest["state_dict"] == path
    assert manifest["dropped"]
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"a.weight"}


def test_what_is_no_tensor_is_named_with_its_type(tmp_path):
    optimizer = {"state": {0: {"exp_avg": torch.ones(2), "step": torch.ones(())}}}
    inner = {"a": torch.ones(2), "version": 3, "_extra": {"b": torch.ones(1)}}
    manifest = convert(
        pickled(tmp_path, {"model": inner, "optimizer": optimizer, "name": "x", "loss": torch.ones(2)}),
        tmp_path / "out",
    )
    assert manifest["dropped"] == {
        "model.version": "int",
        "model._extra": "dict with 1 tensor",
        "optimizer": "dict with 2 tensors",
        "name": "str",
        "loss": "tensor float32 [2]",
    }


def test_several_state_dicts_need_a_key(tmp_path):
    content = {"student": {"a": torch.ones(2)}, "teacher": {"a": torch.zeros(2)}}
    file = pickled(tmp_path, content)
    refused(ValueError, file, tmp_path / "out", "student, teacher", "Choose one: --key student")
    manifest = convert(file, tmp_path / "out", key="teacher")
    assert manifest["state_dict"] == "teacher" and manifest["dropped"] == {"student": "dict with 1 tensor"}
    assert not load_file(tmp_path / "out" / "model.safetensors")["a"].any()


@pytest.mark.parametrize(
    ("key", "text"), [("teach", "has student, teacher"), ("student.a", "must lead to a state dict")]
)
def test_a_key_that_leads_nowhere_is_refused(tmp_path, key, text):
    file = pickled(tmp_path, {"student": {"a": torch.ones(2)}, "teacher": {"a": torch.zeros(2)}})
    message = refused(ValueError, file, tmp_path / "out", key, key=key)
    assert text in message


@pytest.mark.parametrize("archive", [True, False])
def test_a_file_that_runs_code_is_refused_and_does_not(tmp_path, archive):
    trap = tmp_path / "trap"
    file = pickled(tmp_path, {"a": torch.ones(2), "b": Unsafe(trap)}, _use_new_zipfile_serialization=archive)
    refused(ValueError, file, tmp_path / "out", str(file), f"the type {os.mkdir.__module__}.mkdir", "state_dict()")
    assert not trap.exists()


def test_types_of_other_libraries_are_named(tmp_path):
    file = pickled(tmp_path, {"model": {"a": torch.ones(2)}, "args": argparse.Namespace(lr=1)})
    refused(ValueError, file, tmp_path / "out", "the type argparse.Namespace", "tensors and plain containers only")
    file = pickled(tmp_path, torch.nn.Linear(2, 2))
    refused(ValueError, file, tmp_path / "out", "the type torch.nn.modules.linear.Linear")


def test_types_that_other_code_declared_safe_are_not(tmp_path):
    file = pickled(tmp_path, {"a": torch.ones(2), "b": Bundle()})
    with torch.serialization.safe_globals([Bundle]):
        before = set(torch.serialization.get_safe_globals())
        assert Bundle in before
        refused(ValueError, file, tmp_path / "out", "Bundle")
        assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize("content", [b"", b"hello, this is no pickle", b"PK\x03\x04 and then nothing"])
def test_what_is_no_pickle_is_refused(tmp_path, content):
    file = tmp_path / "model.pt"
    file.write_bytes(content)
    refused(ValueError, file, tmp_path / "out", "must be a complete file written by torch.save", str(file))


@pytest.mark.parametrize("archive", [True, False])
def test_a_truncated_file_is_refused(tmp_path, archive):
    file = pickled(tmp_path, weights(), _use_new_zipfile_serialization=archive)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused(ValueError, file, tmp_path / "out", "Download it again")


@pytest.mark.parametrize("content", [{"step": 3}, [1, 2], torch.ones(2), {}, {"model": {"a": 1}}])
def test_a_file_without_named_tensors_is_refused(tmp_path, content):
    refused(ValueError, pickled(tmp_path, content), tmp_path / "out", "must hold named tensors")


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, 2).to_sparse(), torch.ones(2, dtype=torch.complex128), torch.empty(2, device="meta")]
)
def test_tensors_that_safetensors_lacks_are_refused_by_name(tmp_path, tensor):
    refused(ValueError, pickled(tmp_path, {"odd": tensor}), tmp_path / "out", "'odd'", "plain tensor")


def test_names_that_are_no_strings_are_refused(tmp_path):
    refused(ValueError, pickled(tmp_path, {3: torch.ones(2)}), tmp_path / "out", "named by strings", "Got 3 ")


def test_a_missing_file_and_a_used_folder_are_refused(tmp_path):
    refused(FileNotFoundError, tmp_path / "none.pt", tmp_path / "out", "FILE must be a file")
    file = pickled(tmp_path, {"a": torch.ones(2)})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    refused(FileExistsError, file, tmp_path / "out", "new or empty folder", "mine.txt")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    refused(FileExistsError, file, tmp_path / "out" / "mine.txt", "new or empty folder")
    (tmp_path / "out" / "mine.txt").unlink()
    assert convert(file, tmp_path / "out")["tensors"] == 1


def test_large_models_are_written_in_shards_that_open(tmp_path):
    file = pickled(tmp_path, weights())
    shutil.copyfile(HUGINN / "config.json", file.parent / "config.json")
    manifest = convert(file, tmp_path / "out", shard_bytes=60_000)
    assert (
        len(manifest["files"]) > 3 and manifest["files"][0] == f"model-00001-of-{len(manifest['files']):05}.safetensors"
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == manifest["bytes"]
    for name in manifest["files"]:
        assert sum(t.nbytes for t in load_file(tmp_path / "out" / name).values()) <= 60_000
    torch.testing.assert_close(load(tmp_path / "out").model.state_dict(), load(HUGINN).model.state_dict(), **EXACT)


def sharded(tmp_path, count=3):
    homes = {n: f"pytorch_model-{i % count + 1:05}-of-{count:05}.bin" for i, n in enumerate(weights())}
    for file in set(homes.values()):
        pickled(tmp_path, {n: t for n, t in weights().items() if homes[n] == file}, file)
    index = tmp_path / "source" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return index


def test_pickles_that_an_index_names_become_one_model(tmp_path):
    manifest = convert(sharded(tmp_path), tmp_path / "out")
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), weights(), **EXACT)
    assert [entry["file"] for entry in manifest["source"]] == [
        "pytorch_model.bin.index.json",
        *(f"pytorch_model-{n:05}-of-00003.bin" for n in (1, 2, 3)),
    ]


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    index = sharded(tmp_path)
    homes = json.loads(index.read_bytes())["weight_map"]
    first = next(iter(homes))
    index.write_text(json.dumps({"weight_map": {n: f for n, f in homes.items() if n != first}}))
    refused(ValueError, index, tmp_path / "out", f"differ in {first}")
    index.write_text(json.dumps({"weight_map": homes | {first: "../other.bin"}}))
    refused(FileNotFoundError, index, tmp_path / "out", "must name files beside it", "../other.bin")
    index.write_text("[]")
    refused(ValueError, index, tmp_path / "out", "an index with a weight_map")


def test_settings_and_tokenizer_come_along_and_code_does_not(tmp_path):
    file = pickled(tmp_path, {"a": torch.ones(2)})
    for name in ("config.json", "all_config.yaml", "tokenizer.json", "tokenizer.model", "modeling_raven.py", "x.bin"):
        (file.parent / name).write_text("{}")
    manifest = convert(file, tmp_path / "out")
    assert manifest["copied"] == ["all_config.yaml", "config.json", "tokenizer.json", "tokenizer.model"]
    assert not {"modeling_raven.py", "x.bin"} & {path.name for path in (tmp_path / "out").iterdir()}
