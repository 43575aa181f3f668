import importlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab._config import LATER, config_hash, declared, from_dict, to_dict


class Law(ABC):
    @abstractmethod
    def mean(self): ...


@dataclass(frozen=True, kw_only=True)
class FixedLaw(Law):
    steps: int

    def mean(self):
        return self.steps


@dataclass(frozen=True, kw_only=True)
class NestedLaw(Law):
    inner: Law
    scale: float = 1.0

    def mean(self):
        return self.scale * self.inner.mean()


@dataclass(frozen=True, kw_only=True)
class Warmup:
    steps: int = 10


@dataclass(frozen=True, kw_only=True)
class Decay:
    floor: float = 0.0

    def __post_init__(self):
        if self.floor < 0:
            raise ValueError(f"Decay.floor must not be negative. Got {self.floor}. Use 0 to decay to nothing.")


@dataclass(frozen=True, kw_only=True)
class Run:
    law: Law
    schedule: Warmup | Decay = field(default_factory=Warmup)
    later: Decay | None = None
    warmup: Warmup = field(default_factory=Warmup)
    sizes: tuple[int, ...] = ()
    betas: tuple[float, float] = (0.9, 0.95)
    dtype: Literal["float32", "bfloat16"] = "float32"
    steps: int | tuple[int, ...] = 1
    rate: float = 1.0
    clip: float | None = None
    paths: Mapping[str, str] = field(default_factory=dict)
    quick: bool = False


RUN = Run(law=FixedLaw(steps=8))


def written(**changes):
    return {**to_dict(RUN), **changes}


laws = st.recursive(
    st.builds(FixedLaw, steps=st.integers()),
    lambda inner: st.builds(NestedLaw, inner=inner, scale=st.floats(allow_nan=False, allow_infinity=False)),
    max_leaves=3,
)


@given(
    law=laws,
    schedule=st.one_of(st.builds(Warmup, steps=st.integers()), st.builds(Decay, floor=st.floats(0, 1))),
    later=st.none() | st.builds(Decay),
    sizes=st.lists(st.integers()).map(tuple),
    steps=st.integers() | st.lists(st.integers()).map(tuple),
    clip=st.none() | st.floats(0, 10) | st.integers(0, 10),
    paths=st.dictionaries(st.text(), st.text()),
    quick=st.booleans(),
)
def test_a_config_survives_the_round_trip_through_json(**fields):
    config = Run(**fields)
    again = from_dict(Run, json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert config_hash(again) == config_hash(config)


def test_equal_configs_have_equal_hashes_and_others_do_not():
    assert config_hash(replace(RUN, rate=1)) == config_hash(RUN)
    assert config_hash(replace(RUN, rate=1.5)) != config_hash(RUN)
    assert config_hash(replace(RUN, schedule=Decay())) != config_hash(RUN)
    assert len(config_hash(RUN)) == 16


def test_a_kind_may_be_left_out_where_one_class_is_possible():
    assert from_dict(Run, written(warmup={"steps": 3})).warmup == Warmup(steps=3)
    assert from_dict(Run, written(later={"floor": 0.5})).later == Decay(floor=0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rat": 1.0}, "Unknown config key 'rat' for Run. Did you mean 'rate'? Known: law, schedule"),
        ({"law": {"kind": "FixdLaw", "steps": 1}}, "Unknown choice 'FixdLaw' for Run.law. Did you mean 'FixedLaw'?"),
        ({"law": {"steps": 1}}, "Key 'kind' of Run.law is missing. Known: FixedLaw, NestedLaw."),
        ({"law": {"kind": "FixedLaw"}}, "Key 'steps' of Run.law is missing. FixedLaw has no default for it."),
        ({"schedule": {"kind": "FixedLaw", "steps": 1}}, "Unknown choice 'FixedLaw' for Run.schedule. Known: Decay"),
        ({"schedule": {}}, "Key 'kind' of Run.schedule is missing."),
        (
            {"law": {"kind": "NestedLaw", "inner": {"kind": "FixedLaw", "step": 1}}},
            "Unknown config key 'step' for Run.law.inner. Did you mean 'steps'? Known: steps.",
        ),
    ],
)
def test_wrong_keys_and_choices_are_named_with_their_path(change, message):
    with pytest.raises(KeyError) as caught:
        from_dict(Run, written(**change))
    assert message in caught.value.args[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": "fast"}, "Run.rate must be float. Got 'fast'."),
        ({"rate": True}, "Run.rate must be float. Got True."),
        ({"quick": 1}, "Run.quick must be bool. Got 1."),
        ({"warmup": {"steps": True}}, "Run.warmup.steps must be int. Got True."),
        ({"warmup": {"steps": 1.0}}, "Run.warmup.steps must be int. Got 1.0."),
        ({"warmup": {"steps": {"a": 1}}}, "Run.warmup.steps must be int. Got {'a': 1}."),
        ({"warmup": 3}, "Run.warmup must be a mapping of Warmup fields. Got 3."),
        ({"clip": "none"}, "Run.clip must be float or None. Got 'none'."),
        ({"later": 3}, "Run.later must be Decay or None. Got 3."),
        ({"sizes": 3}, "Run.sizes must be a list. Got 3."),
        ({"sizes": [1, "2"]}, "Run.sizes[1] must be int. Got '2'."),
        ({"betas": [0.9]}, "Run.betas must have 2 entries. Got 1."),
        ({"dtype": "float8"}, "Run.dtype must be one of 'float32', 'bfloat16'. Got 'float8'."),
        ({"paths": ["a"]}, "Run.paths must be a mapping. Got ['a']."),
        ({"paths": {"a": 1}}, "Run.paths.a must be str. Got 1."),
    ],
)
def test_wrong_types_are_named_with_their_path(change, message):
    with pytest.raises(TypeError) as caught:
        from_dict(Run, written(**change))
    assert str(caught.value) == message


def test_the_config_itself_refuses_bad_values():
    with pytest.raises(ValueError, match="Decay.floor must not be negative. Got -1.0."):
        from_dict(Run, written(later={"floor": -1.0}))


def test_what_would_not_come_back_is_not_written():
    with pytest.raises(ValueError, match="a number must be finite. Got inf"):
        to_dict(replace(RUN, rate=math.inf))
    with pytest.raises(TypeError, match="keys of a mapping must be strings. Got \\[1\\]"):
        to_dict({1: "a"})
    with pytest.raises(TypeError, match="a value must be a dataclass, number, string, tuple or mapping. Got <object"):
        to_dict(object())

    @dataclass(frozen=True)
    class Sort:
        kind: str

    with pytest.raises(TypeError, match="Sort has a field 'kind'"):
        to_dict(Sort(kind="a"))


def test_choices_of_a_family_are_found_without_importing_their_files(tmp_path, monkeypatch):
    """A new file in a family's folder is all it takes: nobody else imports it."""
    folder = tmp_path / "shapes_of_config"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "base.py").write_text("class Shape:\n    pass\n")
    (folder / "square.py").write_text(
        "from dataclasses import dataclass\nfrom shapes_of_config.base import Shape\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Square(Shape):\n    side: int\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    base = importlib.import_module("shapes_of_config.base")
    square = from_dict(base.Shape, {"kind": "Square", "side": 2})
    assert (type(square).__module__, square.side) == ("shapes_of_config.square", 2)


def test_somebody_elses_dataclass_below_str_makes_no_choice_of_it():
    @dataclass
    class Tag(str):
        note: str = ""

    @dataclass(frozen=True, kw_only=True)
    class Named:
        name: str

    assert Tag("a") == "a"
    assert from_dict(Named, {"name": "a"}) == Named(name="a")


@dataclass(frozen=True, kw_only=True)
class Grown:
    steps: int = 1
    added: float = field(default=0.5, metadata=LATER)
    made: Warmup = field(default_factory=Warmup, metadata=LATER)


@dataclass(frozen=True, kw_only=True)
class Small:
    steps: int = 1


def test_a_field_that_came_later_is_hashed_only_where_it_is_not_its_default():
    assert declared(Grown()) == {"kind": "Grown", "steps": 1}
    assert declared({"a": (Grown(added=1.0),)}) == {"a": [{"kind": "Grown", "steps": 1, "added": 1.0}]}
    assert len({config_hash(Grown()), config_hash(Grown(added=1.0)), config_hash(Grown(made=Warmup(steps=1)))}) == 3
    assert to_dict(Grown())["added"] == 0.5
    plain = {**declared(Grown()), "kind": "Small"}
    assert plain == to_dict(Small())
