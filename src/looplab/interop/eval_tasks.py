"""Tasks of lm-eval by name, from a file, from a folder, or built in.

    builtin            the three tasks of `builtin_tasks.py`
    FILE.yaml, FOLDER  task files of lm-eval's own format; data files are looked for beside them
    hellaswag, mmlu_*  tasks, groups and tags that lm-eval ships, whose data lies on a hub

lm-eval's own thousands of files are read only where a name is not found nearer by. Its warnings are collected instead
of printed; its progress bars are turned off. A task file may name Python functions beside it, which lm-eval runs.
"""

import fnmatch
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

from looplab._registry import did_you_mean
from looplab.interop.builtin_tasks import NAMES, builtin_tasks
from looplab.interop.lm_eval import require_lm_eval

BUILTIN = "builtin"
ENDINGS = (".yaml", ".yml")


class TaskError(ValueError):
    """A task's files or data cannot be used."""


@dataclass(frozen=True)
class Tasks:
    """What was found, in the order it was asked for."""

    tasks: dict[str, Any]
    """Name -> lm-eval's task."""
    groups: dict[str, Any]
    """Name -> lm-eval's group of tasks."""
    origins: dict[str, str]
    """Name of a task -> "built in", "local" or "lm-eval"."""


def load_tasks(wanted: Sequence[str], include: Sequence[str | Path] = ()) -> Tasks:
    """The tasks behind names, files and folders.

    Args:
        include: Folders whose tasks may be named.
    Raises:
        KeyError: A name that nobody knows.
        TaskError: A folder without tasks, a broken file, data that cannot be read or fetched.
        ImportError: lm-eval is not installed.
    """
    require_lm_eval()
    names: list[str] = []
    folders = [builtin_tasks(), *map(_folder, include)]
    files: list[Path] = []
    for entry in wanted:
        path = Path(entry)
        if entry == BUILTIN:
            names += NAMES
        elif path.is_dir():
            folders.append(path)
            names += _names_of(path)
        elif path.suffix in ENDINGS:
            files.append(_file(path))
            names.append(entry)
        else:
            names.append(entry)
    manager, local = _manager(names, folders)
    found = Tasks({}, {}, {})
    for name in dict.fromkeys(names):
        path = Path(name)
        if path in files:
            _enter(manager, path)
            _build(manager, _name_in(path), found, "local")
        else:
            for each in _matching(manager, name):
                origin = local.get(each, "lm-eval")
                _build(manager, each, found, origin)
    return found


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collects what lm-eval would print as warnings, once each, and turns its progress bars off."""
    from tqdm import tqdm

    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = " ".join(record.getMessage().split())
            if text not in heard:
                heard.append(text)

    logger, listener = logging.getLogger("lm_eval"), Listener(logging.WARNING)
    before, start = (logger.propagate, logger.level), tqdm.__init__
    logger.addHandler(listener)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    tqdm.__init__ = partialmethod(start, disable=True)
    try:
        yield heard
    finally:
        tqdm.__init__ = start
        logger.propagate, level = before
        logger.setLevel(level)
        logger.removeHandler(listener)


def _folder(path: str | Path) -> Path:
    if not Path(path).is_dir():
        raise TaskError(f"--include-path must be a folder of task files. Got {str(path)!r}. Check the path.")
    return Path(path)


def _file(path: Path) -> Path:
    if not path.is_file():
        raise TaskError(f"--tasks must name tasks, files or folders. Got {str(path)!r}: no such file. Check the path.")
    _name_in(path)
    return path


def _name_in(path: Path) -> str:
    """The name that a task file gives to its task or group."""
    import yaml
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        settings = load_yaml(path, resolve_func=False)
        name = settings.get("group", settings.get("task"))
    except (ValueError, OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise TaskError(f"--tasks {path}: must be a task file of lm-eval. Got: {reason}. Repair it.") from None
    if not isinstance(name, str):
        raise TaskError(f"--tasks {path}: must be a task file of lm-eval. Got no `task:` with its name. Add it.")
    return name


def _names_of(folder: Path) -> list[str]:
    from lm_eval.tasks import TaskManager

    with listening():
        names = TaskManager(include_path=str(folder), include_defaults=False).all_subtasks
    if not names:
        files = sorted(path.name for path in folder.iterdir())
        raise TaskError(
            f"--tasks {folder}: must hold task files (.yaml) of lm-eval. Got {', '.join(files) or 'an empty folder'}. "
            "Give another folder."
        )
    return list(names)


def _manager(names: Sequence[str], folders: Sequence[Path]) -> tuple[Any, dict[str, str]]:
    """lm-eval's index of tasks, and where the nearer ones come from."""
    from lm_eval.tasks import TaskManager

    paths = [str(folder) for folder in dict.fromkeys(folders)]
    with listening():
        manager = TaskManager(include_path=paths, include_defaults=False)
        local = {name: "built in" if name in NAMES else "local" for name in manager.all_tasks}
        far = [name for name in names if name not in local and not name.endswith(ENDINGS)]
        if far:
            manager = TaskManager(include_path=paths)
    for name in local:
        entry = manager.task_index[name]
        if entry.yaml_path is not None:
            _enter(manager, entry.yaml_path, name)
    return manager, local


def _enter(manager: Any, path: Path, name: str | None = None) -> None:
    """Enters a task file into the index with the paths of its data made absolute; groups stay as they are."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    name = name or _name_in(path)
    if name not in manager.task_index:
        with listening():
            alone = TaskManager(include_path=str(path.parent), include_defaults=False).task_index
        manager.task_index[name] = alone[name]
    settings = load_yaml(path, resolve_func=True)
    if "group" in settings:
        return
    given = dict(settings.get("dataset_kwargs") or {})
    if "data_files" in given:
        settings["dataset_kwargs"] = given | {"data_files": _absolute(given["data_files"], path.parent)}
    entry = manager.task_index[name]
    entry.cfg, entry.yaml_path = settings, None


def _absolute(files: Any, folder: Path) -> Any:
    """Data files beside the task file, by their full paths; what is not there is left as it is."""
    if isinstance(files, Mapping):
        return {split: _absolute(entry, folder) for split, entry in files.items()}
    if isinstance(files, (list, tuple)):
        return [_absolute(entry, folder) for entry in files]
    beside = folder / str(files)
    return str(beside.resolve()) if beside.exists() else files


def _matching(manager: Any, name: str) -> list[str]:
    known = manager.all_tasks
    if name in manager.task_index:
        return [name]
    found = fnmatch.filter(known, name) if any(c in name for c in "*?[") else []
    if not found:
        near = did_you_mean(name, known)
        raise KeyError(
            f"Unknown task {name!r}.{near} Built in: {', '.join(NAMES)}. lm-eval ships {len(known):,} more: "
            "lm-eval ls tasks. A task file of your own is given by its path."
        )
    return found


def _build(manager: Any, name: str, found: Tasks, origin: str) -> None:
    try:
        with listening():
            built = manager.load([name])
    except ImportError as error:
        raise TaskError(f"task {name} needs a package that is not installed. Got: {error}. Install it.") from None
    except Exception as error:  # lm-eval and datasets raise kinds of many libraries for data that they cannot reach
        reason = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
        remedy = (
            "Run it once with a network, which fills the cache of the datasets library, or give a task file with data "
            "files beside it: --tasks FILE.yaml."
            if origin == "lm-eval"
            else "Check dataset_path and dataset_kwargs in its file."
        )
        raise TaskError(f"the data of task {name} must be readable. Got {reason}. {remedy}") from error
    for task, made in built["tasks"].items():
        found.tasks.setdefault(task, made)
        found.origins.setdefault(task, origin)
    found.groups.update(built["groups"])
