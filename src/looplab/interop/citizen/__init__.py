"""looplab models as models of the transformers library: Auto classes, `generate`, `save_pretrained`, Trainer, PEFT.

Importing this package loads that library and registers our model type with its Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from looplab.interop.citizen.cache import LoopCache
from looplab.interop.citizen.config import LooplabConfig
from looplab.interop.citizen.model import LooplabForCausalLM, LooplabOutput

AutoConfig.register(LooplabConfig.model_type, LooplabConfig, exist_ok=True)
AutoModel.register(LooplabConfig, LooplabForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(LooplabConfig, LooplabForCausalLM, exist_ok=True)

__all__ = ["LoopCache", "LooplabConfig", "LooplabForCausalLM", "LooplabOutput"]
