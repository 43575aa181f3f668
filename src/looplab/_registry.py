"""The table of one family: name -> class (or function).

A family is "one file per architecture", "one file per objective", and so on. Reading a table imports the family's
folder once, so a new file needs no edit elsewhere.
"""

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint like " Did you mean 'huginn'?", or nothing when no known name is close."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


@functools.cache
def import_folder(package: str) -> None:
    """Imports every module of a package, once. An import error is raised, never hidden."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


class Registry(Generic[T]):
    """Names of one family. `kind` is the word used in errors; `package` the folder that is imported on reading."""

    def __init__(self, kind: str, *, package: str):
        self.kind = kind
        self._package = package
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters a class or function under `name`. A taken name is a ValueError."""

        def decorate(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is already taken by {self._entries[name]!r}. Choose another.")
            self._entries[name] = entry
            return entry

        return decorate

    def __getitem__(self, name: str) -> T:
        entries = self._all()
        if name not in entries:
            known = sorted(entries)
            raise KeyError(f"Unknown {self.kind} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}.")
        return entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._all()))

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, T]:
        import_folder(self._package)
        return self._entries
