import importlib
import sys

import pytest

from looplab._registry import Registry, did_you_mean, import_folder


@pytest.fixture
def family(tmp_path, monkeypatch):
    """A folder of three files: two register themselves in `base.SHAPES`, as a family does."""
    folder = tmp_path / "shapes"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    base = "from looplab._registry import Registry\nSHAPES = Registry('shape', package='shapes')\n"
    (folder / "base.py").write_text(base)
    for name in ("square", "circle"):
        text = f"from shapes.base import SHAPES\n\n@SHAPES.register('{name}')\nclass {name.title()}:\n    pass\n"
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "shapes"]:
        del sys.modules[name]


def registry_of():
    import_folder.cache_clear()  # each test makes a folder of the same name
    return importlib.import_module("shapes.base").SHAPES


def test_reading_imports_the_folder_once_and_lists_names_in_order(family):
    shapes = registry_of()
    assert "shapes.circle" not in sys.modules
    assert list(shapes) == ["circle", "square"]
    assert len(shapes) == 2
    assert "square" in shapes
    assert shapes["square"].__name__ == "Square"


def test_an_unknown_name_is_answered_with_the_closest_and_all_known(family):
    shapes = registry_of()
    with pytest.raises(KeyError, match="Unknown shape 'sqare'. Did you mean 'square'\\? Known: circle, square."):
        shapes["sqare"]


def test_an_import_error_in_the_folder_is_raised(family):
    (family / "broken.py").write_text("import a_module_that_does_not_exist\n")
    shapes = registry_of()
    with pytest.raises(ModuleNotFoundError, match="a_module_that_does_not_exist"):
        list(shapes)


def test_the_decorator_returns_its_class_and_refuses_a_taken_name():
    shapes = Registry("shape", package="looplab.cli")

    @shapes.register("dot")
    class Dot:
        pass

    assert Dot.__name__ == "Dot"
    with pytest.raises(ValueError, match="shape 'dot' is already taken by"):
        shapes.register("dot")(Dot)


def test_no_close_name_gives_no_hint():
    assert did_you_mean("xyz", ["huginn"]) == ""
    assert did_you_mean("hugin", ["huginn"]) == " Did you mean 'huginn'?"
