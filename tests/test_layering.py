"""Imports point down: read from syntax trees, by the ranks of docs/architecture.md."""

import subprocess
import sys

import pytest

from source import SRC, imports, module_files, where

LAYERS = (
    # Names of one line do not import each other; the first line is the exception.
    ("_registry", "_config", "_types", "_tolerances", "records", "intervals", "journal", "executors"),
    ("nn",),
    ("recurrence",),
    ("models", "data"),
    ("tasks",),
    ("objectives", "engine", "scaling", "solving", "audit"),
    ("training", "diagnostics", "server"),
    ("interop",),
    ("recipes", "report"),
    ("studies",),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Third-party packages that one layer alone may use.
ONLY_IN = {
    "transformers": ("interop",),
    "matplotlib": ("report",),
    "jinja2": ("report", "server"),  # chat templates are Jinja
    "fastapi": ("server",),
    "uvicorn": ("server",),
    "prometheus_client": ("server",),
    "tyro": ("cli",),
    "argparse": ("cli",),
}

TORCH_FREE = (
    *LAYERS[0],
    "nn.cost",
    "recurrence.plan",
    "scaling",
    "engine.request",
    "engine.scheduler",
    "engine.pages",
    "engine.prefix",
    "engine.bound",
    "engine.cost_model",
    "engine.probe",
    "engine.verdict",
    "cli",
)
"""Modules and packages whose import leaves PyTorch out, as far as they exist."""


def unit(path):
    """The first name below looplab: `models` for looplab/models/dense.py."""
    return path.relative_to(SRC).with_suffix("").parts[0]


def below_looplab(name):
    return name.split(".")[1] if name.startswith("looplab.") else None


def test_every_file_has_a_layer():
    unknown = sorted({unit(path) for path in module_files()} - set(RANK) - {"__init__"})
    assert not unknown, f"no layer in LAYERS for {unknown}"


def test_imports_point_down():
    wrong = []
    for path in module_files():
        for imported in imports(path):
            target = below_looplab(imported.name)
            if target in (None, "__version__", unit(path)):
                continue
            if unit(path) == "__init__" or target not in RANK:
                wrong.append(f"{where(path, imported.line)} imports {imported.name}")
            elif RANK[target] > RANK[unit(path)] or RANK[target] == RANK[unit(path)] > 0:
                wrong.append(f"{where(path, imported.line)}: {unit(path)} must not import {target}")
    assert not wrong, "\n".join(wrong)


def test_imports_are_absolute():
    relative = [where(p, i.line) for p in module_files() for i in imports(p) if i.name.startswith(".")]
    assert not relative, f"write the full module name: {relative}"


@pytest.mark.parametrize(("package", "homes"), ONLY_IN.items())
def test_only_some_layers_import(package, homes):
    wrong = [
        where(path, imported.line)
        for path in module_files()
        for imported in imports(path)
        if imported.name.split(".")[0] == package and unit(path) not in homes
    ]
    assert not wrong, f"only {homes} import {package}: {wrong}"


def torch_free_modules():
    files = {".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__") for path in module_files()}
    whole = {
        name for name in files for free in TORCH_FREE if free != "cli" and (name == free or name.startswith(free + "."))
    }
    return ["looplab", *(f"looplab.{name}" for name in sorted(whole | {"cli"} & files))]


def test_light_modules_do_not_import_torch():
    loud = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    loud += "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    result = subprocess.run([sys.executable, "-c", loud, *torch_free_modules()], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
