"""The wheel holds the whole package and needs none of the extras."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

from source import ROOT, SRC

IMPORT_NAMES = {"prometheus-client": "prometheus_client", "lm-eval": "lm_eval"}
"""Distribution -> module, where they differ."""

IMPORT_ALL = """
import importlib, json, pkgutil, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None                     # importing it raises ImportError
import looplab
for module in pkgutil.walk_packages(looplab.__path__, "looplab."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(looplab.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(wheel):
    ignored = ("__pycache__", ".pyc")
    ours = {f"looplab/{p.relative_to(SRC)}" for p in SRC.rglob("*") if p.is_file() and not str(p).endswith(ignored)}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("looplab/")}
    assert packed == ours


@pytest.mark.slow
def test_every_module_imports_without_extras(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {re.split(r"[<>=]", line)[0] for lines in project["optional-dependencies"].values() for line in lines}
    blocked = sorted(IMPORT_NAMES.get(name, name.replace("-", "_")) for name in extras)
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps(blocked)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "looplab" / "__init__.py")
