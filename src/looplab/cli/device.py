"""The `--device` option: refused in one line where this PyTorch cannot use it, before anything is written."""

import torch

from looplab.cli import exit_codes


def check_device(name: str) -> None:
    """Makes sure that a tensor can be made on the device; a UserError says what was asked for."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # a PyTorch without CUDA asserts
        reason = str(error).splitlines()[0].partition(":")[0].rstrip(".")
        raise exit_codes.UserError(
            f"--device must be one that this PyTorch can use, such as cpu. Got {name!r} ({reason}).", exit_codes.USAGE
        ) from None
