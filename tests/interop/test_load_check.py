"""Looking at a checkpoint folder: it says what `load` would do, and everything that is wrong."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from interop.adapters.families import CONFIGS, native
from looplab.interop import builtin_names, load
from looplab.interop.convert import convert
from looplab.interop.load_check import load_check
from looplab.models.base import PRESETS, build
from looplab.models.folder import save_folder
from looplab.models.published import PUBLISHED
from source import ROOT

GOLDEN = ROOT / "tests" / "golden"
HUGINN = GOLDEN / "huginn" / "full"
DENSE = GOLDEN / "retrofit" / "dense"
PUBLISHED_FOLDERS = sorted({path.parent for path in GOLDEN.rglob("weights.safetensors")} - {DENSE})
FIRST = "transformer.prelude.0.attn.Wqkv.weight"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")


def changed(folder, change):
    """The weights of a folder after `change(tensors)`."""
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def huginn(tmp_path, change=lambda tensors: None, **facts):
    folder = tmp_path / "huginn"
    shutil.copytree(HUGINN, folder, ignore=shutil.ignore_patterns("io.*"))
    settings = json.loads((folder / "config.json").read_bytes()) | facts
    (folder / "config.json").write_text(json.dumps({name: v for name, v in settings.items() if v is not None}))
    return changed(folder, change)


def ours(tmp_path, change=lambda tensors: None):
    save_folder(tmp_path, build(PRESETS["tiny-core"]()))
    return changed(tmp_path, change)


def library(tmp_path, name="llama", change=lambda tensors: None):
    native(name).save_pretrained(tmp_path)
    return changed(tmp_path, change)


def agrees(found, folder):
    """What `load` says of the same folder: None, or its refusal."""
    try:
        model = load(folder).model
    except (ValueError, OSError, KeyError) as error:
        assert not found.loads, found
        return str(error.args[0])
    assert found.loads, found.problems
    assert (found.parameters, found.trained_depth) == (model.spec.params.total, str(model.spec.trained_depth))
    assert found.architecture["name"] == model.spec.name
    return None


@pytest.mark.parametrize("folder", PUBLISHED_FOLDERS, ids=lambda path: str(path.relative_to(GOLDEN)))
def test_published_folders_open_and_are_described(folder):
    found = load_check(folder)
    assert (found.problems, found.kind, found.non_finite) == ([], "published", {})
    assert agrees(found, folder) is None
    family = PUBLISHED[found.family]
    assert set(family.notes) <= set(found.notes)
    assert found.architecture["reference"] == family.reference
    tensors = load_file(folder / "weights.safetensors")
    assert (found.tensors, found.bytes) == (len(tensors), sum(t.nbytes for t in tensors.values()))


def test_every_published_family_was_looked_at():
    looked_at_elsewhere = {"ifm"}  # no file was recorded; tests/interop/test_assume.py makes its folders
    assert {load_check(folder).family for folder in PUBLISHED_FOLDERS} == set(PUBLISHED) - looked_at_elsewhere


@pytest.mark.parametrize("name", builtin_names())
def test_builtin_folders_open(name):
    found = load_check(name)
    assert agrees(found, name) is None
    tokenizer = "task" if name.startswith("par-") else "bytes"
    assert (found.kind, found.tokenizer, found.kv_rule) == ("looplab", tokenizer, str(load(name).model.spec.kv_rule))


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "dory", "hrm_text", "inkling2_loop", "albert"])
def test_folders_of_the_library_open(tmp_path, name):
    assert name in CONFIGS
    found = load_check(library(tmp_path, name))
    assert (found.problems, found.kind) == ([], "transformers")
    assert agrees(found, tmp_path) is None
    assert any("comparison" in note for note in found.notes)


def test_a_puzzle_model_has_no_kv_rule():
    assert load_check(GOLDEN / "hrm").kv_rule == "none, not causal"


def test_every_tensor_that_does_not_fit_is_listed(tmp_path):
    def change(tensors):
        for name in [n for n in tensors if n.startswith("transformer.coda.")]:
            del tensors[name]
        tensors |= {f"extra.{n}": torch.ones(1) for n in range(20)}
        tensors["transformer.ln_f.weight"] = torch.ones(3)

    found = load_check(huginn(tmp_path, change))
    gone = sorted(n for n in load_file(HUGINN / "weights.safetensors") if n.startswith("transformer.coda."))
    assert len(gone) > 8
    assert found.missing == gone
    assert found.unexpected == sorted(f"extra.{n}" for n in range(20))
    assert found.misshapen == ["transformer.ln_f.weight: file [3], model [32]"]
    assert found.problems == [agrees(found, tmp_path / "huginn")]
    assert found.parameters == load_check(HUGINN).parameters


@pytest.mark.parametrize("make", [ours, library])
def test_misfits_of_other_folders_are_listed(tmp_path, make):
    names = sorted(load_file(next(make(tmp_path).glob("*.safetensors"))))
    matrices = [n for n in names if "mlp" in n or "ffn" in n]

    def change(tensors):
        del tensors[names[-1]]
        tensors["extra.one"] = tensors["extra.two"] = torch.ones(2)
        tensors["extra.two"] = torch.zeros(2)
        tensors[matrices[0]] = torch.ones(3, 3)

    found = load_check(changed(tmp_path, change))
    assert (found.missing, found.unexpected) == ([names[-1]], ["extra.one", "extra.two"])
    assert [line.split(":")[0] for line in found.misshapen] == [matrices[0]]
    assert "file [3, 3]" in found.misshapen[0]
    agrees(found, tmp_path)


@pytest.mark.parametrize("make", [huginn, ours, library])
def test_numbers_that_are_not_finite_are_counted_for_every_tensor(tmp_path, make):
    spoilt = {}

    def change(tensors):
        for count, name in enumerate([n for n, t in tensors.items() if t.dim() == 2][:3], start=1):
            tensors[name].view(-1)[:count] = [float("nan"), float("inf"), -float("inf")][count - 1]
            spoilt[name] = count

    folder = make(tmp_path, change=change)
    found = load_check(folder)
    assert found.non_finite == spoilt and len(spoilt) == 3
    assert len(found.problems) == 3
    agrees(found, folder)


def test_numbers_of_tensors_that_are_not_read_do_not_matter(tmp_path):
    folder = huginn(tmp_path, lambda tensors: tensors["freqs_cis"].fill_(torch.nan))
    found = load_check(folder)
    assert list(found.non_finite) == ["freqs_cis"]
    with pytest.warns(UserWarning, match="freqs_cis of the file") as caught:
        assert agrees(found, folder) is None
    assert str(caught[0].message) in found.notes
    spoilt = {"albert.pooler.bias": torch.full((32,), torch.nan)}
    albert = library(tmp_path / "albert", "albert", lambda tensors: tensors.update(spoilt))
    found = load_check(albert)
    assert found.non_finite == {"albert.pooler.bias": 32}
    assert agrees(found, albert) is None


def test_ties_are_told_by_storage_and_by_bytes(tmp_path):
    def change(tensors):
        tensors["transformer.coda.0.attn.proj.weight"] = tensors["transformer.prelude.0.attn.proj.weight"].clone()

    same = {"names": ["transformer.coda.0.attn.proj.weight", "transformer.prelude.0.attn.proj.weight"]}
    ties = load_check(huginn(tmp_path, change)).ties
    assert same | {"by": "equal bytes"} in [tie | {"names": sorted(tie["names"])} for tie in ties]
    tensors = load_file(HUGINN / "weights.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    torch.save(tensors, tmp_path / "model.pt")
    shutil.copyfile(HUGINN / "config.json", tmp_path / "config.json")
    convert(tmp_path / "model.pt", tmp_path / "out")
    found = load_check(tmp_path / "out")
    assert any(
        set(t["names"]) == {"lm_head.weight", "transformer.wte.weight"} and t["by"] == "storage" for t in found.ties
    )
    assert found.loads


def test_norms_of_ones_are_not_ties(tmp_path):
    def change(tensors):
        for name in ("transformer.prelude.0.norm_1.weight", "transformer.coda.0.norm_1.weight"):
            tensors[name].fill_(1.0)

    assert load_check(huginn(tmp_path, change)).ties == []


def test_a_claimed_tie_that_does_not_hold_is_a_problem(tmp_path):
    folder = huginn(tmp_path, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}))
    found = load_check(folder)
    assert found.problems == [agrees(found, folder)]
    assert "config says tie_embeddings" in found.problems[0]


@pytest.mark.parametrize(
    ("facts", "nearest"),
    [
        ({"model_type": "huginn_ravn"}, "huginn_raven"),
        ({"model_type": "zzzz"}, "huginn"),
        ({"model_type": "llamma"}, "llama"),
    ],
)
def test_an_unknown_family_is_said_with_the_nearest(tmp_path, facts, nearest):
    folder = huginn(tmp_path, **facts)
    found = load_check(folder)
    assert (found.kind, found.family, found.nearest) == ("unknown", "unknown", nearest)
    assert found.problems == [agrees(found, folder)]
    assert found.tensors and found.dtypes


def test_a_folder_without_settings_resembles_a_family(tmp_path):
    folder = huginn(tmp_path)
    (folder / "config.json").unlink()
    found = load_check(folder)
    assert (found.family, found.nearest, found.problems) == ("unknown", "huginn", [agrees(found, folder)])
    assert "has no config.json" in found.problems[0]


def test_a_family_may_be_given(tmp_path):
    folder = huginn(tmp_path, model_type=None, format="other")
    assert load_check(folder, family="huginn").loads
    with pytest.raises(KeyError, match="Did you mean 'huginn'"):
        load_check(folder, family="hugin")


@pytest.mark.parametrize("make", [huginn, ours, library])
@pytest.mark.parametrize("harm", ["pickle", "absent", "truncated"])
def test_broken_weights_are_a_problem(tmp_path, make, harm):
    folder = make(tmp_path)
    file = next(folder.glob("*.safetensors"))
    if harm == "pickle":
        file.rename(folder / "pytorch_model.bin")
    elif harm == "absent":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100])
    found = load_check(folder)
    said = agrees(found, folder)
    assert len(found.problems) == 1
    assert {"pickle": "looplab convert", "absent": "has no", "truncated": "is truncated"}[harm] in found.problems[0]
    assert found.problems == [said] or harm == "absent"


def test_a_tokenizer_is_looked_for(tmp_path):
    folder = ours(tmp_path)
    settings = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(settings | {"tokenizer": "tokenizer.json"}))
    found = load_check(folder)
    agrees(found, folder)
    assert "tokenizer" in found.problems[0] and found.tokenizer == ""


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(KeyError, match="MODEL must be a checkpoint folder"):
        load_check(tmp_path / "none")


MEMORY = """
import sys, threading, time
from looplab.interop.load_check import load_check
from looplab.interop.adapters import ADAPTERS
list(ADAPTERS)
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
peak, done = [anonymous()], []
start = peak[0]
def watch():
    while not done:
        peak.append(anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
found = load_check(sys.argv[1])
done.append(1)
thread.join()
assert found.loads, found.problems
print((max(peak) - start) * 1024, found.bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_model_is_never_whole_in_memory(tmp_path):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=8
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {name: torch.full(t.shape, 0.5) for name, t in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(tmp_path)
    words = [sys.executable, "-W", "ignore", "-c", MEMORY, str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    used, size = map(int, result.stdout.split())
    assert size > 700e6
    assert used < size / 4, (used, size)
