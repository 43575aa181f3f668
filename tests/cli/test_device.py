import pytest
import torch

from looplab.cli import exit_codes
from looplab.cli.device import check_device


def no_cuda(*args, device):
    raise AssertionError("Torch not compiled with CUDA enabled")


def test_the_cpu_can_be_used():
    check_device("cpu")


def test_a_device_that_is_not_there_is_named_and_refused(monkeypatch):
    with pytest.raises(exit_codes.UserError) as caught:
        check_device("abacus")
    assert caught.value.code == exit_codes.USAGE
    assert "such as cpu. Got 'abacus' (" in caught.value.message
    monkeypatch.setattr(torch, "empty", no_cuda)
    with pytest.raises(exit_codes.UserError, match=r"Got 'cuda' \(Torch not compiled with CUDA enabled\)\."):
        check_device("cuda")
