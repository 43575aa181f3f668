"""Replicas: what is refused before a cluster is asked. What they do on one: tests/contract/test_server_ray.py."""

import sys

import pytest

from looplab.cli import main
from looplab.server.replicas import Replicas, connected, require_ray_serve


def test_at_least_one_replica_is_asked_for():
    with pytest.raises(ValueError, match=r"--replicas must be at least 1\. Got 0\."):
        Replicas(count=0)


def test_the_extra_is_named_where_ray_serve_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(ImportError, match=r"--replicas needs Ray Serve .* pip install 'looplab\[cluster\]'"):
        require_ray_serve()
    with pytest.raises(ImportError, match="needs Ray Serve"), connected(""):
        pass


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--replicas", "0"], 2, "--replicas must be at least 1. Got 0."),
        (["--replicas", "2", "--port", "0"], 2, "--port must be named with --replicas. Got 0."),
        (["--replicas", "2", "--host", "0.0.0.0"], 2, "--host must be a local address where no API key is set"),
    ],
)
def test_mistakes_are_said_before_a_cluster_is_started(capsys, monkeypatch, words, code, message):
    monkeypatch.delenv("LOOPLAB_API_KEYS", raising=False)
    monkeypatch.setattr("looplab.server.replicas.connected", None)
    assert main(["serve", "text-core", *words]) == code
    assert message in capsys.readouterr().err


def test_a_model_that_does_not_open_is_said_before_a_cluster_is_started(capsys, monkeypatch):
    monkeypatch.setattr("looplab.server.replicas.deploy", None)
    assert main(["serve", "nowhere", "--replicas", "2"]) == 3
    assert "nowhere" in capsys.readouterr().err
