"""Hidden states of scored tokens, kept between the walk and the fits, in the dtype that `coda` returned.

In memory while they fit into `budget` bytes, in memory-mapped temporary files beyond it. Nothing outlives `close`.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.data.documents import DataError


class Spool:
    """One table of `rows` hidden states per schedule."""

    def __init__(self, rows: int, schedules: int, *, budget: int, folder: Path | None = None):
        """`folder`: where files go if there are any; default: the system's temporary folder."""
        self.rows, self.schedules, self.budget = rows, schedules, budget
        self._parent = folder or Path(tempfile.gettempdir())
        self._folder: Path | None = None
        self._tables: dict[str, Tensor] = {}

    def put(self, schedule: str, place: Int[Tensor, " part"], hidden: Float[Tensor, "part dim"]) -> None:
        """Stores rows of one schedule at their places in the token table."""
        if schedule not in self._tables:
            self._tables[schedule] = self._new(hidden)
        self._tables[schedule][place] = hidden

    def get(self, schedule: str) -> Float[Tensor, "rows dim"]:
        """The table of one schedule."""
        return self._tables[schedule]

    def drop(self, schedule: str) -> None:
        """Forgets one schedule; later rows of it start a new table."""
        self._tables.pop(schedule, None)

    def close(self) -> None:
        """Frees the memory and deletes the files."""
        self._tables.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _new(self, hidden: Tensor) -> Tensor:
        size = self.rows * hidden.shape[1]
        total = self.schedules * size * hidden.element_size()
        if total <= self.budget:
            return torch.zeros(self.rows, hidden.shape[1], dtype=hidden.dtype)
        if self._folder is None:
            self._check_disk(total)
            self._folder = Path(tempfile.mkdtemp(prefix="looplab-spool-", dir=self._parent))
        path = self._folder / f"{len(self._tables)}"
        return torch.from_file(str(path), shared=True, size=size, dtype=hidden.dtype).view(self.rows, -1)

    def _check_disk(self, total: int) -> None:
        free = shutil.disk_usage(self._parent).free
        if total > free:
            raise DataError(f"the spool needs {total / 1e9:.1f} GB, {free / 1e9:.1f} free in {self._parent}.")
