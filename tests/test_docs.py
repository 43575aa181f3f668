"""What README and docs say is run: Python blocks whole, shell blocks as far as their commands and options exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from looplab.cli import COMMANDS, EXAMPLES, main
from looplab.interop import builtin_names
from looplab.models.base import PRESETS
from source import ROOT, SRC, module_files

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def page_id(page):
    return str(page.relative_to(ROOT))


def blocks(page, *languages):
    return [text for language, text in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


def shell_lines():
    for page in PAGES:
        for block in blocks(page, "bash", "sh", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words:
                    yield page_id(page), words


SHELL_LINES = list(shell_lines())


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=page_id)
def test_python_blocks_run(page, tmp_path):
    """The blocks of a page run in order, as a reader would paste them into one session."""
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-W", "error", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, f"{page_id(page)}:\n{result.stderr}"


@pytest.mark.parametrize(
    ("page", "words"),
    [(page, words) for page, words in SHELL_LINES if words[0].rsplit("/")[-1] == "looplab"],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_looplab_commands_exist_with_their_options(page, words, capsys):
    command, options = words[1], [word.split("=")[0] for word in words[2:] if word.startswith("--")]
    if command.startswith("-"):
        return
    assert command in COMMANDS, f"{page}: no command {command}"
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    known = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    assert set(options) <= known, f"{page}: {command} has no {sorted(set(options) - known)}"


def test_models_that_are_named_are_built_in():
    """In pages, in `looplab --help` and in the Makefile: `looplab audit MODEL`, `looplab describe MODEL`."""
    lines = [(page, words) for page, words in SHELL_LINES if words[0] == "looplab"]
    lines += [("looplab --help", example.split()) for example, _ in EXAMPLES]
    lines += [
        ("Makefile", line.split()) for line in (ROOT / "Makefile").read_text().splitlines() if "/looplab " in line
    ]
    named = {(page, w[2]) for page, w in lines if w[1] in ("audit", "describe") and not w[2].startswith("-")}
    assert {page for page, _ in named} >= {"README.md", "looplab --help", "Makefile"}
    known = {*builtin_names(), *PRESETS}
    assert not {(page, model) for page, model in named if model not in known}


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    makes = [(page, words[words.index("make") + 1 :]) for page, words in SHELL_LINES if "make" in words]
    asked = {(page, word) for page, words in makes for word in words}
    assert {word for _, word in asked} >= {"demo", "test"}, "README no longer shows its two commands"
    missing = [f"{page}: make {word}" for page, word in sorted(asked) if word not in targets]
    assert not missing, missing


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in PAGES:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append(f"{page_id(page)}: {target}")
    assert not broken, "\n".join(broken)


def test_files_that_pages_name_exist():
    """`models/base.py` in backticks is a file of the package, of docs or of tests."""
    lost = []
    for page in PAGES:
        for name in re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)*\.(?:py|md))`", page.read_text(encoding="utf-8")):
            bases = (ROOT, ROOT / "src", ROOT / "src" / "looplab", page.parent)
            if "/" in name and not name.endswith("/x.py") and not any((Path(base) / name).exists() for base in bases):
                lost.append(f"{page_id(page)}: {name}")
    assert not lost, "\n".join(lost)


def test_readme_tree_names_real_folders():
    listed = re.findall(r"^ {6}([a-z_]+)/ ", (ROOT / "README.md").read_text(), re.MULTILINE)
    here = {p.name for p in (ROOT / "src" / "looplab").iterdir() if p.is_dir() and not p.name.startswith("_")}
    assert set(listed) == here


def test_every_paper_of_the_source_is_in_the_index_with_its_files():
    index = {}
    for line in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").splitlines():
        for number in ARXIV.findall(line):
            index[number] = set(re.findall(r"`([a-z_0-9/]+\.py)`", line))
    source = {}
    for path in module_files():
        for number in ARXIV.findall(path.read_text(encoding="utf-8")):
            source.setdefault(number, set()).add(str(path.relative_to(SRC)))
    missing = [f"{number}: add {files - index.get(number, set())}" for number, files in source.items()]
    missing = [line for line in missing if not line.endswith("set()")]
    stale = [f"{number}: drop {files - source.get(number, set())}" for number, files in index.items()]
    stale = [line for line in stale if not line.endswith("set()")]
    assert not missing + stale, "docs/papers.md\n" + "\n".join(missing + stale)
