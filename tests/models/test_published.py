"""Rules, key maps, and how a model is put together from foreign tensors."""

import dataclasses
import json
import re
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from looplab.models.base import PRESETS, build
from looplab.models.looped import Looped
from looplab.models.published import PUBLISHED, KeyMap, Rename, Split, assemble, bare, misfit, understand
from source import ROOT
from tolerances import EXACT

FOLDER = ROOT / "tests" / "golden" / "huginn" / "mqa"
FACTS = json.loads((FOLDER / "config.json").read_text())
WEIGHTS = load_file(FOLDER / "weights.safetensors")
HUGINN = PUBLISHED["huginn"]
SMALL = KeyMap(
    (Rename("a.weight", "x", (4,), (2, 2)), Split("b", (("y", 1), ("z", 2)), dim=1)),
    ignorable=(r"table\.\d+",),
    aliases={"head.weight": "a.weight"},
)


def test_rules_read_and_write_bit_by_bit():
    rename, split = SMALL.rules
    table = torch.randn(2, 2)
    assert torch.equal(*rename.read([table]), table.reshape(4))
    assert torch.equal(*rename.write(rename.read([table])), table)
    fused = torch.randn(2, 3)
    first, second = split.read([fused])
    assert torch.equal(first, fused[:, :1]) and torch.equal(second, fused[:, 1:])
    assert torch.equal(*split.write([first, second]), fused)
    with pytest.raises(ValueError, match=r"load: b must have 3 entries along axis 1\. Got shape \(2, 4\)"):
        split.read([torch.zeros(2, 4)])


@pytest.mark.parametrize(
    ("name", "stripped"),
    [
        ("a.weight", "a.weight"),
        ("_orig_mod.module.a.weight", "a.weight"),
        ("model.model.head.weight", "head.weight"),
        ("module.table.12", "table.12"),
        ("module.c", "module.c"),  # not known without the wrapper either
        ("model.x", "model.x"),  # ours, not theirs
    ],
)
def test_wrappers_go_only_where_the_rest_is_known(name, stripped):
    assert SMALL.strip(name) == stripped


def test_wrappers_all_go_where_nothing_is_known_yet():
    assert bare("_forward_module._orig_mod.gpt.inner.a.weight") == "a.weight"


def test_the_message_lists_names_and_stops_at_eight():
    names = [f"n{i}" for i in range(9)]
    assert misfit(["a"], [], []) == "1 tensor missing (a)"
    assert misfit(["a", "b"], ["c"], ["d: file [1], model [2]"]) == (
        "2 tensors missing (a, b), 1 unexpected (c), 1 of wrong shape (d: file [1], model [2])"
    )
    assert misfit([], names, []) == "9 tensors unexpected (n0, n1, n2, n3, n4, n5, n6, n7, ...)"


def test_a_name_that_is_there_twice_under_wrappers_is_refused():
    doubled = WEIGHTS | {"model.transformer.ln_f.weight": WEIGHTS["transformer.ln_f.weight"]}
    with pytest.raises(ValueError, match=r"load: 1 tensor unexpected \(model\.transformer\.ln_f\.weight\)"):
        assemble(HUGINN, FACTS, doubled)


def test_the_tie_may_be_stored_under_either_name():
    renamed = {"lm_head.weight" if n == "transformer.wte.weight" else n: t for n, t in WEIGHTS.items()}
    one, other = (assemble(HUGINN, FACTS, tensors).state_dict() for tensors in (WEIGHTS, renamed))
    torch.testing.assert_close(one, other, **EXACT)


def test_types_stay_as_they_are_or_are_cast():
    halved = {name: tensor.bfloat16() for name, tensor in WEIGHTS.items() if name != "freqs_cis"}
    kept = assemble(HUGINN, FACTS, halved)
    assert {p.dtype for p in kept.parameters()} == {torch.bfloat16}
    cast = assemble(HUGINN, FACTS, halved, dtype=torch.float64)
    assert {p.dtype for p in cast.parameters()} == {torch.float64}


def test_the_model_is_its_own_ready_to_train_and_in_eval_mode():
    tensors = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    model = assemble(HUGINN, FACTS, tensors)
    for tensor in tensors.values():
        tensor.fill_(7)
    assert torch.equal(model.final_norm.weight, WEIGHTS["transformer.ln_f.weight"])
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert not model.training


def test_tensors_are_read_one_rule_at_a_time():
    class Counting(dict):
        reads = ()

        def __getitem__(self, name):
            self.reads += (name,)
            return super().__getitem__(name)

    tensors = Counting(WEIGHTS)
    assemble(HUGINN, FACTS, tensors, shapes={name: tuple(t.shape) for name, t in WEIGHTS.items()})
    read = Counter(tensors.reads)
    del read[next(iter(tensors))]  # where annotations are checked, the first tensor of a mapping is looked at
    assert read == dict.fromkeys([*WEIGHTS][1:], 1)


def test_a_misshapen_file_is_refused_before_it_is_read():
    shapes = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()} | {"transformer.ln_f.weight": (33,)}
    with pytest.raises(ValueError, match=re.escape("(transformer.ln_f.weight: file [33], model [32])")):
        understand(HUGINN, FACTS, shapes)


def test_a_rotary_table_of_another_length_is_refused():
    table = WEIGHTS["freqs_cis"][:, :16].contiguous()
    with pytest.raises(ValueError, match=re.escape("(freqs_cis: file [1, 16, 1, 4, 2], model [1, 32, 1, 4, 2])")):
        assemble(HUGINN, FACTS, WEIGHTS | {"freqs_cis": table})


def test_a_key_map_that_leaves_a_weight_unset_is_our_fault():
    def shorter(config):
        names = HUGINN.key_map(config)
        return dataclasses.replace(
            names, rules=names.rules[1:], ignorable=(*names.ignorable, r"transformer\.wte\.weight")
        )

    family = dataclasses.replace(HUGINN, key_map=shorter)
    tensors = {name: tensor for name, tensor in WEIGHTS.items() if name != "transformer.wte.weight"}
    with pytest.raises(RuntimeError, match=r"huginn: the key map gives embedding\.weight no value"):
        assemble(family, FACTS, tensors)


def test_a_weight_under_several_names_is_filled_under_all():
    class Twice(Looped):
        def __init__(self, config):
            super().__init__(config)
            self.again = self.final_norm

    model = assemble(dataclasses.replace(HUGINN, build=Twice), FACTS, WEIGHTS)
    assert model.again.weight is model.final_norm.weight


def test_every_family_exports_what_its_tiny_presets_hold():
    """Rules of every family, on weights that no file recorded: names are given back one to one."""
    for name, preset in (
        ("huginn", "tiny-huginn"),
        ("retrofit", "tiny-retrofit-llama"),
        ("retrofit", "tiny-retrofit-olmo"),
    ):
        model = build(PRESETS[preset](), seed=5)
        names = PUBLISHED[name].key_map(model.config)
        foreign = names.export(model.state_dict())
        assert set(foreign) == names.theirs
        back = {}
        for rule in names.rules:
            back |= zip(rule.ours, rule.read([foreign[n] for n in rule.theirs]), strict=True)
        torch.testing.assert_close(back, dict(model.state_dict()), **EXACT)


def test_every_family_builds_without_storage_where_it_is_told_to():
    tiny = {PUBLISHED[n].name: p for n in PUBLISHED for p in PRESETS if p.startswith(f"tiny-{n}")}
    assert {"trm", "hrm", "huginn", "ouro", "parcae", "loopformer"} <= set(tiny)
    for name, preset in tiny.items():
        with torch.device("meta"):
            model = PUBLISHED[name].build(PRESETS[preset]())
        assert all(tensor.is_meta for tensor in model.state_dict().values()), name
