"""Families: rules from a width and num_steps to a shape.

Shape rules decide what a planner answers, so no answer is printed without the name of its family. A layer of width d
has 12 d^2 matrix entries (attention 4, MLP 8), and attention as wide as the layer; a looped model also injects its
context by a map of 2 d to d, which counts inside the core.
"""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass

from looplab.nn.cost import CostSpec, Group


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A prelude, one core and a coda, as costs see them. Matrix entries count without embedding and head."""

    n_once: int
    n_rec: int
    layers_once: int
    layers_core: int
    width: int
    vocab_size: int
    attention_width: int | None = None
    """Heads times head size of one layer; None: the width."""
    kv_width: int | None = None
    """Numbers that one layer keeps per token, keys and values together; None: twice the width."""

    @property
    def stored(self) -> int:
        """n_once + n_rec."""
        return self.n_once + self.n_rec

    @property
    def cost(self) -> CostSpec:
        """The groups of `looplab.nn.cost`; what runs once stands in the prelude."""
        wide = self.width if self.attention_width is None else self.attention_width
        keys = 2 * self.width if self.kv_width is None else self.kv_width

        def layers(matmul: int, count: int) -> Group:
            return Group(matmul=matmul, attention_width=wide * count, layers=count, kv_width=keys * count)

        return CostSpec(
            prelude=layers(self.n_once, self.layers_once),
            blocks=(layers(self.n_rec, self.layers_core),),
            coda=Group(),
            head=Group(matmul=self.width * self.vocab_size),
        )


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """A rule for shapes."""

    vocab_size: int = 32_064
    injection: int = 2
    """Matrix entries of the injection in units of width^2; none where num_steps is 1."""

    @abstractmethod
    def layers(self, num_steps: int) -> tuple[int, int]:
        """(layers outside, layers inside the core).

        Raises:
            ValueError: num_steps that the family cannot have.
        """

    @property
    @abstractmethod
    def name(self) -> str:
        """How the command line writes it."""

    def shape(self, width: int, num_steps: int) -> Shape:
        """The model of this width."""
        if width < 1 or num_steps < 1:
            raise ValueError(f"{self.name}: width and num_steps must be 1 or more. Got {width} and {num_steps}.")
        once, core = self.layers(num_steps)
        inject = self.injection * width * width if num_steps > 1 else 0
        return Shape(
            n_once=12 * width * width * once,
            n_rec=12 * width * width * core + inject,
            layers_once=once,
            layers_core=core,
            width=width,
            vocab_size=self.vocab_size,
        )


@dataclass(frozen=True, kw_only=True)
class IsoDepth(Family):
    """Executed layers are held: more iterations mean fewer stored layers (arXiv:2604.21106)."""

    executed: int = 20
    prelude: int = 2
    coda: int = 2

    @property
    def name(self) -> str:
        return f"iso-depth:{self.executed},{self.prelude},{self.coda}"

    def layers(self, num_steps: int) -> tuple[int, int]:
        inside = self.executed - self.prelude - self.coda
        if inside < num_steps or inside % num_steps:
            legal = ", ".join(str(r) for r in range(1, inside + 1) if inside % r == 0)
            raise ValueError(
                f"{self.name}: num_steps must divide the {inside} layers inside the loop. Got {num_steps}. "
                f"Take one of {legal}."
            )
        return self.prelude + self.coda, inside // num_steps


@dataclass(frozen=True, kw_only=True)
class IsoStored(Family):
    """Stored layers are held: more iterations mean more depth."""

    prelude: int = 2
    core: int = 4
    coda: int = 2

    @property
    def name(self) -> str:
        return f"iso-stored:{self.prelude},{self.core},{self.coda}"

    def layers(self, num_steps: int) -> tuple[int, int]:
        return self.prelude + self.coda, self.core


@dataclass(frozen=True, kw_only=True)
class FullyLooped(Family):
    """All layers are inside the loop; a loop over the model and a loop over each layer cost the same."""

    core: int = 12

    @property
    def name(self) -> str:
        return f"fully-looped:{self.core}"

    def layers(self, num_steps: int) -> tuple[int, int]:
        return 0, self.core


FAMILIES: dict[str, tuple[type[Family], tuple[str, ...]]] = {
    "iso-depth": (IsoDepth, ("executed", "prelude", "coda")),
    "iso-stored": (IsoStored, ("prelude", "core", "coda")),
    "fully-looped": (FullyLooped, ("core",)),
}
"""Name on the command line -> class, and the fields that its numbers fill."""


def read_family(text: str, *, vocab_size: int = 32_064) -> Family:
    """The family that `iso-depth:20,2,2` names.

    Raises:
        ValueError: An unknown name or a wrong number of layers.
    """
    name, _, numbers = text.partition(":")
    if name not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}. Got {text!r}. Write iso-depth:20,2,2.")
    cls, names = FAMILIES[name]
    parts = [part for part in numbers.split(",") if part]
    if len(parts) not in (0, len(names)) or not all(part.isdigit() for part in parts):
        want = ",".join(n.upper() for n in names)
        raise ValueError(f"family {name} must be written {name}:{want}. Got {text!r}. Give {len(names)} whole numbers.")
    found: Family = dataclasses.replace(
        cls(vocab_size=vocab_size), **dict(zip(names, map(int, parts), strict=len(parts) > 0))
    )
    return found
