"""Values that know where they stand in results.json, so that every printed number can say so."""

from collections.abc import Iterator
from typing import Any


class Keyed:
    """A part of a result beside its path, such as `domains[0].decompositions[0].gap`.

    Attributes and items lead to further parts. `held` is the plain value; `home` numbers the result that it belongs to:
    0 for the page's own, n for the n-th shown beside it.
    """

    __slots__ = ("held", "home", "path")

    def __init__(self, held: Any, path: str = "", home: int = 0) -> None:
        self.held, self.path, self.home = held, path, home

    def __getattr__(self, name: str) -> "Keyed":
        return Keyed(getattr(self.held, name), f"{self.path}.{name}" if self.path else name, self.home)

    def __getitem__(self, item: int | str) -> "Keyed":
        text = f"[{item}]" if isinstance(item, int) else f'["{item}"]'
        return Keyed(self.held[item], self.path + text, self.home)

    def __iter__(self) -> Iterator["Keyed"]:
        """The items of a sequence, or the values of a mapping."""
        keys = self.held if isinstance(self.held, dict) else range(len(self.held))
        return (self[key] for key in keys)

    def __len__(self) -> int:
        return len(self.held)

    def __bool__(self) -> bool:
        return bool(self.held)

    def where(self, **wanted: Any) -> list["Keyed"]:
        """The items whose attributes equal `wanted`, in order."""
        return [item for item in self if all(getattr(item.held, name) == value for name, value in wanted.items())]
