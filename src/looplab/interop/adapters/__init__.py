"""Models of the transformers library, asked through our contract. One file per family, or per group of families.

Imported when a folder of another library is opened, and not before: `import looplab` never loads transformers.
"""

from looplab.interop.adapters.base import ADAPTERS, Adapter
from looplab.interop.adapters.folder import open_folder

__all__ = ["ADAPTERS", "Adapter", "open_folder"]
