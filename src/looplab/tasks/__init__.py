"""Tasks with exact answers and exact intermediate values, one file each."""

from looplab.tasks.base import IGNORED, TASKS, Draws, Example, Grade, Progress, Split, Task, Trace, window_targets

__all__ = [
    "IGNORED",
    "TASKS",
    "Draws",
    "Example",
    "Grade",
    "Progress",
    "Split",
    "Task",
    "Trace",
    "window_targets",
]
