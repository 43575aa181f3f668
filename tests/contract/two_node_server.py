"""A program: two replicas of a built-in model on a Ray cluster of two local nodes, until standard input ends.

Run by test_server_ray in a process of its own, where no test's hooks wrap what Ray has to pickle.
"""

import functools
import sys

import ray

import looplab
from looplab.engine.config import EngineConfig
from looplab.interop.serving import open_engine
from looplab.server.config import ServerConfig
from looplab.server.replicas import Replicas, deploy, stop
from ray_cluster import two_nodes

SIZES = EngineConfig(num_pages=64, launch_rows=4, min_coda_rows=1)


def built_in_engine(name: str):
    """What a replica opens."""
    return open_engine(looplab.load(name), SIZES, name=name)


def main() -> None:
    """Serves on the port of the first argument."""
    with two_nodes() as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            replicas = Replicas(count=2, port=int(sys.argv[1]))
            open_one = functools.partial(built_in_engine, "text-core")
            print("Serving", deploy(open_one, ServerConfig(names=("text-core",)), replicas), flush=True)
            sys.stdin.read()
        finally:
            stop()
            ray.shutdown()


if __name__ == "__main__":
    main()
