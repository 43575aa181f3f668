"""The recorder: states and recorded tensors of a run, by name, under a memory limit.

trace.states[k]      state after k applications (k = 0 .. K)
trace.records[k]     what the model recorded in application k (k = 0 .. K - 1)
"""

from dataclasses import dataclass, field
from typing import Any

from looplab.recurrence import state as states


@dataclass
class Recorder:
    """Handed to the loop; keeps what it is asked to keep.

    Args:
        keep_states: Keep the state after every application.
        keep_records: Ask the model for its named tensors (routing, attention maps) and keep them.
        max_bytes: Limit on what is kept; beyond it, recording is an error rather than a full memory.
    """

    keep_states: bool = True
    keep_records: bool = False
    max_bytes: int = 2**31
    states: list[Any] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    nbytes: int = 0

    def start(self, state: Any) -> None:
        """The state before application 0; forgets an earlier run."""
        self.states, self.records, self.nbytes = [], [], 0
        self._keep_state(state)

    def applied(self, state: Any, record: dict[str, Any] | None) -> None:
        """The state after one more application, and what the model put into its record."""
        self._keep_state(state)
        if record is not None:
            self._count(tuple(record.values()))
            self.records.append(record)

    def _keep_state(self, state: Any) -> None:
        if self.keep_states:
            self._count(state)
            self.states.append(state)

    def _count(self, kept: Any) -> None:
        self.nbytes += states.nbytes(kept)
        if self.nbytes > self.max_bytes:
            raise MemoryError(
                f"Recorder.max_bytes is {self.max_bytes}, and {self.nbytes} bytes would be kept after "
                f"{len(self.states)} states. Raise it, shorten the plan, or set keep_states=False."
            )
