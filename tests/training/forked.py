"""Several processes of one run, forked: what torchrun does, without starting Python and PyTorch again."""

import os
import signal
import socket
import sys
import traceback

# What every process would import, once.
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

from looplab.training.ranks import joined

PATIENCE = 280
"""Seconds after which a process ends itself: one that waits for another, which is not there, would wait for long."""


def free_port():
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def forked(body, *, size=2):
    """Runs `body(ranks)` in `size` processes; True for each that came to its end."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            _child(body, {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children]


def _child(body, environment):
    status = 1
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(PATIENCE)
    try:
        os.environ.update(environment)
        with joined("cpu") as ranks:
            body(ranks)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
