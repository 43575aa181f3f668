"""From a checkpoint to an engine that serves it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from looplab.engine.config import EngineConfig
from looplab.engine.engine import Engine
from looplab.engine.tokenizer import PlainTokenizer
from looplab.engine.verdict import ReuseResult
from looplab.interop.checkpoint import LoadedModel, tokenizer_folder
from looplab.recurrence.exit.base import ExitRule

TEMPLATE = "chat_template.jinja"


def open_engine(
    loaded: LoadedModel,
    config: EngineConfig | None = None,
    *,
    name: str = "",
    gates: Mapping[str, ExitRule] | None = None,
    reuse: Sequence[ReuseResult] = (),
) -> Engine:
    """An engine for a loaded checkpoint.

    Args:
        name: What answers call the model. Default: what it was opened as.
        gates, reuse: As for `Engine`; `interop.reuse.settle_reuse` says what a verdict means for `config`.
    Raises:
        ValueError: The checkpoint has no tokenizer, or the engine cannot serve its model.
    """
    if loaded.tokenizer is None:
        raise ValueError(
            f"MODEL must have a tokenizer to be served. Got {loaded.name}, which reads ids of a task. "
            "Serve a text model, such as the built-in demo."
        )
    tokenizer = PlainTokenizer(loaded.tokenizer, chat_template(loaded.folder))
    return Engine(loaded.model, tokenizer, config, name=name or Path(loaded.name).name, gates=gates, reuse=reuse)


def chat_template(folder: Path) -> str | None:
    """The Jinja source that a checkpoint brings; None where it brings none."""
    for home in {folder, tokenizer_folder(folder) or folder}:
        if (home / TEMPLATE).is_file():
            return (home / TEMPLATE).read_text(encoding="utf-8")
        settings = home / "tokenizer_config.json"
        if settings.is_file():
            found = json.loads(settings.read_bytes()).get("chat_template")
            if isinstance(found, list):  # named templates
                found = next((one["template"] for one in found if one.get("name") == "default"), None)
            if isinstance(found, str):
                return found
    return None
