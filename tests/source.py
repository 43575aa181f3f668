"""The package's source as syntax trees; nothing of it is executed."""

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "looplab"


class Import(NamedTuple):
    """One imported module or name, written out: `from looplab.a import b` is `looplab.a.b`."""

    name: str
    line: int


def module_files() -> list[Path]:
    """Every Python file of the package."""
    return sorted(SRC.rglob("*.py"))


def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> list[Import]:
    """All imports of a file, those inside functions included. A relative import begins with its dots."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found += [Import(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def where(path: Path, line: int) -> str:
    """`src/looplab/a.py:3`, for messages."""
    return f"{path.relative_to(ROOT)}:{line}"
