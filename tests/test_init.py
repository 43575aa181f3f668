"""The public API: few names, each found on first access."""

import re
import subprocess
import sys

import pytest

import looplab
from source import ROOT


@pytest.mark.parametrize("name", looplab.__all__)
def test_every_public_name_resolves(name):
    value = getattr(looplab, name)
    home = looplab._HOMES.get(name)
    assert value is getattr(looplab, name)
    if home:
        assert value is getattr(sys.modules[home], name)


def test_there_are_few_public_names():
    assert len(looplab.__all__) <= 40
    assert set(looplab.__all__) <= set(dir(looplab))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'looplab' has no attribute 'laod'"):
        looplab.laod  # noqa: B018


def test_importing_looplab_imports_no_numpy_and_no_torch():
    code = "import sys, looplab; print(sorted({'numpy', 'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_the_version_is_the_one_of_the_changelog():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest.group(1) == looplab.__version__
