"""Bad checkpoints and bad arguments: what is said, row by row of one table, and where it is tested.

Tested elsewhere, by the row's own words:

     1  tests/interop/test_published.py::test_a_named_family_decides
     1  tests/models/test_folder.py::test_an_unknown_model_or_key_gets_a_suggestion
     4  tests/interop/test_published.py::test_an_unknown_newer_family_is_refused_with_the_known_ones
     4  tests/interop/test_adapters.py::test_unknown_families_list_the_known_ones
     5  tests/interop/test_published.py::test_settings_that_lie_about_the_weights_are_refused
     5  tests/interop/test_adapters.py::test_missing_unexpected_and_misshapen_tensors_are_listed
     5  tests/models/test_folder.py::test_tensors_that_do_not_fit_are_listed
     7  tests/interop/test_published.py::test_a_tie_that_does_not_hold_is_refused_unless_it_is_denied
     9  tests/recurrence/test_loop.py::test_depths_that_are_no_counts_are_refused
     9  tests/recurrence/test_plan.py::test_steps_that_are_no_counts_are_refused
    10  tests/recurrence/test_loop.py::test_a_depth_beyond_the_trained_one_is_warned_of
    11  tests/recurrence/test_spec.py::test_an_index_past_the_table_is_refused_by_name
    12  tests/models/test_base.py::test_a_token_outside_the_vocabulary_is_named_with_its_place
    13  tests/models/test_base.py::test_too_many_tokens_are_refused
    14  tests/models/test_looped.py::test_missing_or_misshapen_noise_is_refused
    14  tests/models/test_looped.py::test_needless_noise_is_refused
    15  tests/models/test_base.py::test_padding_on_a_side_that_is_not_handled_is_refused
    15  tests/interop/test_adapters.py::test_token_types_make_the_prompt_of_hrm_text_see_itself_whole
    16  tests/models/test_base.py::test_a_row_of_padding_only_is_refused
    17  tests/recurrence/test_loop.py::test_caches_are_refused_where_they_make_no_sense
    18  tests/models/test_base.py::test_a_cache_of_other_rows_or_too_few_places_is_refused
    19  tests/models/test_base.py::test_a_model_that_sees_both_ways_has_no_cache
    20  tests/models/test_trm.py::test_the_token_mlp_takes_its_own_length_only
    20  tests/models/test_puzzle.py::test_what_is_no_grid_is_refused
    21  tests/models/test_loopformer.py::test_step_sizes_that_go_past_the_end_or_back_are_refused
    22  tests/interop/test_adapters.py::test_a_rollout_that_differs_is_refused_with_its_first_layer
    23  tests/interop/test_adapters.py::test_a_family_that_the_installed_library_lacks_names_the_version
    25  tests/nn/test_attention.py::test_a_shape_that_cannot_be_is_refused
    26  tests/interop/test_checkpoint.py::test_types_that_do_not_run_are_refused

Here: rows 2, 3, 6, 7 and 8 for every kind of folder alike (ours, published, of the transformers library), each also
through `load_check`; settings that lie about ties or layers, or hold what no model can have; names of a model hub; and
row 25's unknown key.
"""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from interop.adapters.families import native
from looplab._config import from_dict
from looplab.cli import exit_codes, main
from looplab.interop import load
from looplab.interop.load_check import load_check
from looplab.models.base import PRESETS, build
from looplab.models.folder import save_folder
from looplab.models.looped import LoopedConfig
from looplab.models.published import PUBLISHED, bare, configured
from source import ROOT
from tolerances import EXACT

GOLDEN = ROOT / "tests" / "golden"
SOURCES = {"huginn": "huginn/mqa", "ouro": "ouro/grouped", "parcae": "parcae/linear", "retrofit": "retrofit/olmo"}
SOURCES |= {"loopformer": "loopformer", "trm": "trm/token_mlp", "hrm": "hrm", "vera": "vera"}
NORM = {"ours": "final_norm.weight", "published": "transformer.ln_f.weight", "library": "model.norm.weight"}
"""Kind of folder -> a tensor of it."""

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")

every_kind = pytest.mark.parametrize("kind", NORM)


def published(folder, family="huginn", **facts):
    shutil.copytree(GOLDEN / SOURCES[family], folder, ignore=shutil.ignore_patterns("io.*", "README.md"))
    (folder / "weights.safetensors").rename(folder / "model.safetensors")
    return told(folder, **facts)


def library(folder, name="llama", **facts):
    native(name).save_pretrained(folder)
    return told(folder, **facts)


def made(kind, folder):
    """A good folder of a kind; its weights are model.safetensors."""
    if kind == "ours":
        save_folder(folder, build(PRESETS["tiny-core"]()))
    else:
        (published if kind == "published" else library)(folder)
    return folder


def told(folder, **facts):
    """The folder with some settings changed; None takes one away."""
    settings = json.loads((folder / "config.json").read_bytes()) | facts
    (folder / "config.json").write_text(json.dumps({name: v for name, v in settings.items() if v is not None}))
    return folder


def changed(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def said(folder, **options):
    """What `load` refuses a folder with, and `load_check` says too."""
    with pytest.raises((ValueError, OSError, KeyError)) as caught:
        load(folder, **options)
    message = str(caught.value.args[0])
    found = load_check(folder, **options)
    assert message in found.problems and not found.loads
    return message


def test_the_table_names_tests_that_exist():
    named = re.findall(r"^ +\d+  (\S+)::(\w+)$", __doc__, re.M)
    assert len(named) == 29
    absent = [test for file, test in named if f"\ndef {test}(" not in (ROOT / file).read_text()]
    assert not absent


@every_kind
def test_row_2_what_is_missing_and_what_is_there(tmp_path, kind):
    folder = made(kind, tmp_path / "f")
    others = sorted(path.name for path in folder.iterdir() if path.name != "model.safetensors")
    (folder / "model.safetensors").unlink()
    assert said(folder) == f"load: {folder} has no *.safetensors. Found: {', '.join(others)}"
    (folder / "config.json").unlink()
    assert said(folder) == f"load: {folder} has no config.json. Found: {', '.join(others[1:]) or 'nothing'}"


@pytest.mark.parametrize("kind", ["published", "library"])
def test_row_2_shards_without_their_index(tmp_path, kind):
    folder = made(kind, tmp_path / "f")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert said(folder).startswith(
        f"load: {folder} has no model.safetensors.index.json, model.safetensors or weights.safetensors. Found: "
    )


@every_kind
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_row_3_pickles_name_the_command_that_converts(tmp_path, kind, file):
    folder = made(kind, tmp_path / "f")
    (folder / "model.safetensors").rename(folder / file)
    assert said(folder) == (
        f"load: {folder / file} is a pickle; looplab does not unpickle. "
        f"Convert it once: looplab convert {folder / file} OUT"
    )


@every_kind
def test_row_6_truncated_weights_say_both_sizes(tmp_path, kind):
    folder = made(kind, tmp_path / "f")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    size = r"[\d.,]+ (bytes|kB)"
    pattern = rf"load: {re.escape(str(file))} is truncated \(header says {size}, file has {size}\)\. Download it again"
    assert re.fullmatch(pattern, said(folder))
    file.write_bytes(b"\xff" * 64)
    assert said(folder) == f"load: {file} is no safetensors file (64 bytes). Download it again"


@every_kind
def test_row_8_numbers_that_are_not_finite_are_counted(tmp_path, kind):
    def spoil(tensors):
        tensors[NORM[kind]][:3] = torch.inf

    folder = changed(made(kind, tmp_path / "f"), spoil)
    with pytest.raises(ValueError, match=r"^load: 3 non-finite values in (final_norm|model\.norm)\.weight$"):
        load(folder)
    found = load_check(folder)
    assert found.non_finite == {NORM[kind]: 3}
    assert found.problems == [f"load: 3 non-finite values in {NORM[kind]}"]


@pytest.mark.parametrize(("name", "table"), [("llama", "model.embed_tokens"), ("gpt2", "transformer.wte")])
def test_row_7_a_tie_that_does_not_hold_in_a_folder_of_the_library(tmp_path, name, table):
    """The library itself opens it untied, with a line in its log."""

    def untie(tensors):
        tensors["lm_head.weight"] = tensors[f"{table}.weight"] + 0.31

    folder = changed(library(tmp_path, name, tie_word_embeddings=True), untie)
    assert said(folder) == (
        f"load: config says tie_embeddings but lm_head.weight and {table}.weight differ (max 0.31). "
        "Pass tie=False or fix the file"
    )
    inner = load(folder, tie=False).model.inner
    torch.testing.assert_close(inner.lm_head.weight, inner.get_input_embeddings().weight + 0.31, **EXACT)
    assert load_check(folder, tie=False).loads


def test_a_tie_may_be_claimed_or_denied_of_a_folder_of_the_library(tmp_path):
    folder = library(tmp_path, "llama-tied", tie_word_embeddings=False)
    assert said(folder) == "load: 1 tensor missing (lm_head.weight)"
    inner = load(folder, tie=True).model.inner
    assert inner.lm_head.weight is inner.get_input_embeddings().weight
    assert load_check(folder, tie=True).loads


def test_settings_that_lie_about_layers_list_them(tmp_path):
    folder = library(tmp_path / "few", num_hidden_layers=2)
    assert said(folder).startswith("load: 9 tensors unexpected (model.layers.2.input_layernorm.weight, ")
    folder = library(tmp_path / "many", num_hidden_layers=4)
    assert said(folder).startswith("load: 9 tensors missing (model.layers.3.input_layernorm.weight, ")
    folder = published(tmp_path / "ouro", "ouro", num_hidden_layers=2, layer_types=None)
    assert said(folder).startswith("load: 11 tensors missing (model.layers.1.input_layernorm.weight, ")


def refusal(family, settings, shapes):
    """What a family says of settings that it cannot read."""
    try:
        configured(PUBLISHED[family], settings, shapes)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("family", SOURCES)
def test_a_setting_that_is_gone_is_named_or_has_a_default(family):
    folder = GOLDEN / SOURCES[family]
    settings = json.loads((folder / "config.json").read_bytes())
    shapes = {bare(name): tuple(tensor.shape) for name, tensor in load_file(folder / "weights.safetensors").items()}
    named = 0
    for key in settings:
        told = refusal(family, {k: v for k, v in settings.items() if k != key}, shapes)
        assert told is None or told.startswith("load: ")
        named += key in (told or "")
    assert named >= (0 if family == "vera" else 3)


@pytest.mark.parametrize("junk", ["x", -1, 0, 2.5, []], ids=str)
@pytest.mark.parametrize("family", SOURCES)
def test_settings_that_no_model_can_have_are_refused_in_our_words(tmp_path, family, junk):
    folder = published(tmp_path / "f", family)
    width = next(k for k in ("n_embd", "hidden_size", "dim") if k in json.loads((folder / "config.json").read_bytes()))
    told(folder, **{width: junk})
    problems = load_check(folder, family=family).problems
    assert problems and all(problem.startswith("load: ") for problem in problems)
    with pytest.raises(ValueError, match=r"^load: "):
        load(folder, family=family)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("llama", {"hidden_size": "x"}),
        ("llama", {"hidden_size": -4}),
        ("llama", {"num_attention_heads": 0}),
        ("dory", {"n_recurrent_loops": []}),
        ("gpt2", {"dtype": "x"}),
    ],
)
def test_settings_that_the_library_refuses_are_refused_in_our_words(tmp_path, name, facts):
    message = said(library(tmp_path, name, **facts))
    assert message.startswith("load: config.json must hold what a model of ") and message.endswith(". Copy it again.")


@pytest.mark.parametrize("file", ["weights.safetensors", "model.safetensors.index.json"])
def test_a_folder_of_the_library_may_have_its_weights_where_published_ones_do(tmp_path, file):
    folder = library(tmp_path / "f")
    expected = load(folder).model.state_dict()
    tensors = load_file(folder / "model.safetensors")
    if file == "weights.safetensors":
        (folder / "model.safetensors").rename(folder / file)
    else:
        homes = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
        for part in set(homes.values()):
            save_file({n: t for n, t in tensors.items() if homes[n] == part}, folder / part)
        (folder / file).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
        save_file({"stray": torch.zeros(1)}, folder / "model.safetensors")  # the index wins
    save_file({"stray": torch.zeros(1)}, folder / "optimizer.safetensors")  # not of the model, not read
    loaded = load(folder)
    torch.testing.assert_close(loaded.model.state_dict(), expected, **EXACT)
    assert not hasattr(loaded.model.inner.config, "transformers_weights")
    found = load_check(folder)
    assert found.loads and found.tensors == len(tensors)


@pytest.mark.parametrize("command", [["audit"], ["describe"], ["load-check"]])
def test_a_name_of_a_hub_says_how_to_get_a_folder(command, capsys):
    assert main([*command, "ByteDance/Ouro-1.4B"]) == exit_codes.MODEL
    assert (
        "Got 'ByteDance/Ouro-1.4B'. looplab downloads nothing; a model of a hub is opened from a local folder. "
        "Get one: hf download ByteDance/Ouro-1.4B --local-dir DIR, then give DIR." in capsys.readouterr().err
    )


def test_row_25_an_unknown_key_of_a_configuration():
    with pytest.raises(KeyError, match="Unknown config key 'dimm' for LoopedConfig. Did you mean 'dim'?"):
        from_dict(LoopedConfig, {"dimm": 8})


def test_every_family_with_a_recorded_folder_is_here():
    assert SOURCES.keys() | {"ifm"} == set(PUBLISHED)
