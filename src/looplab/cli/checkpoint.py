"""How a command is told to read a checkpoint: `--family`, `--tie`, `--no-tie`, `--assume`, and opening it with them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

import looplab
from looplab.cli import exit_codes
from looplab.cli.exit_codes import UserError

if TYPE_CHECKING:
    from looplab.interop import LoadedModel

FLAGS = {
    "Pass family=NAME": "Pass --family NAME",
    "Pass tie=False": "Pass --no-tie",
    "load: tie must": "--tie must",
    "Pass assume=": "Pass --assume ",
    "load: assume must": "--assume must",
}
"""What `looplab.load` advises in Python -> the same on a command line."""


@dataclass(frozen=True, kw_only=True)
class ReadAs:
    """What a command may say of a checkpoint of somebody else's, where its files leave it open or are wrong."""

    family: str = "auto"
    """Published family that the checkpoint is read as (see `looplab list families`). Default: what its files say."""
    tie: tyro.conf.FlagCreatePairsOff[bool] = False
    """Its head and its embedding are one table, whatever its settings say."""
    no_tie: tyro.conf.FlagCreatePairsOff[bool] = False
    """Its head and its embedding are two tables, whatever its settings say."""
    assume: str | None = None
    """Answers to what its files leave open, such as gate=fc1,rope=interleaved. Nothing checks them, unless it has
    recorded logits (logits.safetensors) that they must fit; results say so. Default: what the recorded logits fit."""

    @property
    def tied(self) -> bool | None:
        """The argument `tie` of `looplab.load`.

        Raises:
            UserError: Both flags.
        """
        if self.tie and self.no_tie:
            raise UserError("--tie and --no-tie exclude each other. Got both. Leave one out.", exit_codes.USAGE)
        return True if self.tie else False if self.no_tie else None


def open_checkpoint(
    name: str, read_as: ReadAs | None = None, *, dtype: str = "float32", device: str = "cpu"
) -> "LoadedModel":
    """`looplab.load` for a command.

    Args:
        read_as: None: as the checkpoint's files say.
    Raises:
        UserError: It does not open; the message names flags, not arguments.
    """
    said = read_as or ReadAs()
    family, tie, assume = said.family, said.tied, said.assume
    try:
        with exit_codes.user_error(exit_codes.MODEL):
            return looplab.load(name, family=family, tie=tie, assume=assume, dtype=dtype, device=device)
    except UserError as error:
        raise UserError(in_flags(error.message), error.code) from error


def in_flags(message: str) -> str:
    """A message of `looplab.load` as it is said on a command line."""
    for argument, flag in FLAGS.items():
        message = message.replace(argument, flag)
    return message
