"""The tree is the architecture diagram: tests mirror it, and it holds nothing unfinished or tied to one machine."""

import ast
import re
import subprocess

import pytest

from source import ROOT, SRC, imports, module_files, tree, where

NO_TEST_FILE = {
    "_types.py": "axis names only; every test with a tensor checks them",
    "_tolerances.py": "constants; the tests that use them check them",
}
"""Files without a test file of their own, and why."""

TESTED_IN: dict[str, str] = {
    "server/ask.py": "server/test_app.py",
    "server/body.py": "server/test_app.py",
    "server/config.py": "server/test_lifecycle.py",
    "server/errors.py": "server/test_app.py",
    "server/guard.py": "server/test_app.py",
    "server/metrics.py": "server/test_app.py",
    "server/stream.py": "server/test_answer.py",
    "cli/scaling_check.py": "cli/test_scaling.py",
    "cli/scaling_cost.py": "cli/test_scaling.py",
    "cli/scaling_fit.py": "cli/test_scaling.py",
    "cli/scaling_match.py": "cli/test_scaling.py",
    "report/scaling.py": "cli/test_scaling.py",
    "scaling/examples.py": "scaling/test_runs.py",
    "scaling/run_checks.py": "scaling/test_runs.py",
    "engine/config.py": "engine/test_engine.py",
    "engine/request.py": "engine/test_live.py",
    "engine/stages.py": "engine/test_runner.py",
    "engine/launches.py": "engine/test_runner.py",
    "engine/sections.py": "engine/test_runner.py",
    "engine/lives.py": "engine/test_scheduler.py",
    "engine/reports.py": "engine/test_scheduler.py",
    "engine/residents.py": "engine/test_scheduler.py",
    "engine/seats.py": "engine/test_scheduler.py",
}
"""Files whose behaviour shows only through a neighbour: file -> the test file that covers it."""

UNFINISHED = re.compile("|".join(["Not" + "Implemented", "TO" + "DO", "FIX" + "ME", "X" + "XX"]))
MACHINE = re.compile("|".join([r"(^|[^A-Za-z0-9_.])/(work|root|home|Users)/", "python" + "hosted", "pypi" + r"\.org"]))
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc", "core"}


def has_public_names(path):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) and not node.name.startswith("_") for node in tree(path).body)


def homes_of_tests(path):
    """Where the tests of a module may stand, the usual place first.

    src/looplab/a/b.py -> tests/a/test_b.py. In a family (a folder with a base.py) all files may share the family's
    test file, tests/a/test_family.py or tests/contract/test_family.py, and base.py is tested through any of its files.
    """
    inside = path.relative_to(SRC)
    tests = ROOT / "tests"
    yield tests / inside.parent / f"test_{inside.stem.strip('_')}.py"
    if (path.parent / "base.py").exists():
        yield tests / inside.parent.parent / f"test_{path.parent.name}.py"
        yield tests / "contract" / f"test_{path.parent.name}.py"
    if path.name == "base.py":
        yield from (tests / inside.parent).glob("test_*.py")


def test_every_module_has_its_test_file():
    missing = []
    for path in module_files():
        name = str(path.relative_to(SRC))
        if has_public_names(path) and name not in NO_TEST_FILE:
            homes = [ROOT / "tests" / TESTED_IN[name]] if name in TESTED_IN else list(homes_of_tests(path))
            if not any(home.exists() for home in homes):
                missing.append(f"{path.relative_to(ROOT)} needs {homes[0].relative_to(ROOT)}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("name", [*NO_TEST_FILE, *TESTED_IN])
def test_the_exceptions_exist(name):
    assert (SRC / name).exists(), f"{name} is gone; delete its line above"


def test_test_files_mirror_a_module():
    """Test files in a folder that the package has stand beside a module of the same name."""
    lost = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        inside = path.relative_to(ROOT / "tests")
        name = inside.stem.removeprefix("test_")
        folder = SRC / inside.parent
        if len(inside.parts) > 1 and folder.is_dir():
            known = {p.stem.strip("_") for p in folder.glob("*.py")} | {p.name for p in folder.iterdir() if p.is_dir()}
            if name not in known:
                lost.append(f"{path.relative_to(ROOT)}: looplab/{inside.parent} has no {name}")
    assert not lost, "\n".join(lost)


def test_slow_twins_import_nothing_of_ours():
    ours = [
        where(path, imported.line)
        for path in sorted((ROOT / "tests" / "reference").rglob("*.py"))
        for imported in imports(path)
        if imported.name.split(".")[0] == "looplab"
    ]
    assert not ours, f"a twin that shares code proves nothing: {ours}"


def test_names_say_what_is_inside():
    vague = [str(path.relative_to(ROOT)) for path in module_files() if path.stem in VAGUE or path.parent.name in VAGUE]
    assert not vague, f"a file without a concept: {vague}"


def test_every_module_has_a_docstring():
    silent = [str(path.relative_to(ROOT)) for path in module_files() if not ast.get_docstring(tree(path))]
    assert not silent, f"no module docstring: {silent}"


def test_the_source_is_finished():
    left = []
    for path in module_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if UNFINISHED.search(line):
                left.append(f"{where(path, number)}: {line.strip()}")
    assert not left, "\n".join(left)


def test_annotations_are_not_postponed():
    """jaxtyping checks annotations as values, so no module turns them into strings."""
    postponed = [where(p, i.line) for p in module_files() for i in imports(p) if i.name == "__future__.annotations"]
    assert not postponed, postponed


def test_nothing_names_a_machine_or_a_registry():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so the tracked files are unknown")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file() or b"\0" in (data := path.read_bytes())[:8192]:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if MACHINE.search(line):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)
