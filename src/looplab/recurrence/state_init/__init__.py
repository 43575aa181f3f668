"""State starts: the state before application 0. One file per choice."""

from looplab.recurrence.state_init.base import STATE_INITS, StateInit
from looplab.recurrence.state_init.fixed_buffer import FixedBuffer
from looplab.recurrence.state_init.from_embeds import FromEmbeds
from looplab.recurrence.state_init.learned import Learned
from looplab.recurrence.state_init.normal import Normal
from looplab.recurrence.state_init.unit import Unit
from looplab.recurrence.state_init.zeros import Zeros

__all__ = ["STATE_INITS", "FixedBuffer", "FromEmbeds", "Learned", "Normal", "StateInit", "Unit", "Zeros"]
