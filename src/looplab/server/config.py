"""Limits and manners of a server."""

import math
from dataclasses import dataclass

LOCAL = ("localhost", "127.0.0.1", "::1")
"""Names and addresses that only this machine can reach."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What a server allows, and for how long."""

    names: tuple[str, ...]
    """Names of the model; answers say the first."""
    keys: tuple[str, ...] = ()
    """Bearer tokens; empty: nobody is asked for one."""
    hosts: tuple[str, ...] = LOCAL
    """Values of `Host`, without port, that are answered; "*" allows all."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may read answers; none unless asked for."""
    page: bool = True
    """Whether `/` shows the built-in page."""
    max_body_bytes: int = 4 * 2**20
    max_prompts: int = 128
    """Prompts of one request."""
    send_timeout: float = 60.0
    """Seconds without progress after which a slow reader is dropped."""
    drain_seconds: float = 30.0
    """How long residents may go on after SIGTERM."""

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError("ServerConfig.names must name the model. Got none. Give at least one name.")
        if not all(self.keys):
            raise ValueError("ServerConfig.keys must be texts. Got an empty one. Remove it.")
        for name in ("max_body_bytes", "max_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"ServerConfig.{name} must be at least 1. Got {getattr(self, name)}.")
        for name in ("send_timeout", "drain_seconds"):
            value = getattr(self, name)
            if not (0 <= value < math.inf):
                raise ValueError(f"ServerConfig.{name} must be seconds, at least 0. Got {value}.")
