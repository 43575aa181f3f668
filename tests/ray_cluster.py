"""A real Ray cluster of two local nodes, for tests."""

from contextlib import contextmanager

import pytest


@contextmanager
def two_nodes():
    """Starts two nodes with one CPU each, and stops them at the end; `small` are the arguments of a node."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", "0" * 32)  # else Ray writes one into the home folder
        import ray
        from ray.cluster_utils import Cluster

        patch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)  # listens on the loopback only
        small = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        started = Cluster(initialize_head=True, head_node_args=small)
        started.small = small
        started.add_node(**small)
        yield started
        started.shutdown()
