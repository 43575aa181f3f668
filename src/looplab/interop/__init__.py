"""Other people's formats, and the one door through which checkpoints come in."""

from looplab.interop.checkpoint import LoadedModel, builtin_folder, builtin_names, export, load

__all__ = ["LoadedModel", "builtin_folder", "builtin_names", "export", "load"]
