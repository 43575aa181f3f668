"""The same application as several replicas on a Ray cluster, behind one address (extra `cluster`).

    each replica    an engine of its own, with its own cache; no tensor parallelism: a model fits one device
    routing         by load; a request stays where it began
    health          /health of the replica's engine: one that has died is replaced
    end             replicas take nothing new, and their answers go on for `drain_seconds`

An answer under way on a replica that dies ends with a broken connection or status 500, which the openai client retries.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from looplab.server.config import ServerConfig

APPLICATION = "looplab"
HEALTH_SECONDS = 5.0
"""Between two looks at a replica."""
ENDS = (signal.SIGTERM, signal.SIGINT)
WATCH_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Where and how many."""

    count: int
    host: str = "127.0.0.1"
    port: int = 8000
    ongoing: int = 280
    """Requests that a replica holds: residents and waiting ones."""
    resources: Mapping[str, float] | None = None
    """CPUs and GPUs of each, as Ray names them ("CPU", "GPU"). None: one CPU."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"--replicas must be at least 1. Got {self.count}. Leave it out for one process.")


def require_ray_serve() -> None:
    """Raises ImportError naming the extra where Ray Serve is missing."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"--replicas needs Ray Serve ({error}). Install the extra: pip install 'looplab[cluster]'."
        ) from error


def deploy(open_engine: Callable[[], Any], config: ServerConfig, replicas: Replicas) -> str:
    """Starts the replicas on the Ray cluster of this process (`ray.init`), and returns their address once all answer.

    Args:
        open_engine: Makes a replica's engine, on its machine; it and what it needs must travel by pickle, and paths of
            checkpoints must exist there.
    """
    require_ray_serve()
    from ray import serve

    resources = dict(replicas.resources or {"CPU": 1.0})
    options: dict[str, Any] = {"num_cpus": resources.pop("CPU", 0.0), "num_gpus": resources.pop("GPU", 0.0)}
    if resources:
        options["resources"] = resources
    serve.start(http_options={"host": replicas.host, "port": replicas.port})
    deployment: Any = serve.deployment(
        replica_class(open_engine, config),
        name="replica",
        num_replicas=replicas.count,
        max_ongoing_requests=replicas.ongoing,
        graceful_shutdown_timeout_s=config.drain_seconds,
        health_check_period_s=HEALTH_SECONDS,
        ray_actor_options=options,
    )
    serve.run(deployment.bind(), name=APPLICATION, route_prefix="/")
    return f"http://{replicas.host}:{replicas.port}"


@contextmanager
def connected(address: str) -> Iterator[Callable[[], int]]:
    """A Ray cluster for `deploy`, and what waits for SIGTERM or SIGINT; replicas end with it.

    Args:
        address: HOST:PORT of a cluster that runs; empty: one on this machine, started and stopped here.

    Raises:
        ImportError: Ray Serve is missing.
        ConnectionError: No cluster answers at the address.
    """
    require_ray_serve()
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address:
        ray.init(address=address, **quiet)
    else:
        ray.init(address="local", include_dashboard=False, **quiet)
    told: list[int] = []
    # Ray's own handlers, which it sets as it starts, end the process at once.
    before = {name: signal.signal(name, lambda number, frame: told.append(number)) for name in ENDS}
    logging.getLogger("ray.serve").setLevel(logging.ERROR)

    def until_told() -> int:
        while not told:
            time.sleep(WATCH_SECONDS)
        return 0 if told[0] == signal.SIGTERM else 130

    try:
        yield until_told
    finally:
        stop()
        ray.shutdown()
        for name, handler in before.items():
            signal.signal(name, handler)


def replica_class(open_engine: Callable[[], Any], config: ServerConfig) -> type:
    """What Ray runs: the application of `build_app` around an engine of its own."""
    from ray import serve

    def application() -> Any:
        from looplab.server.app import build_app

        engine = open_engine()
        engine.start()
        app = build_app(engine, engine.tokenizer, config)
        app.state.engine = engine
        _here["engine"] = engine
        return app

    @serve.ingress(application)
    class Replica:
        """One engine behind the application."""

        def check_health(self) -> None:
            """Raises where the engine has died; Ray then starts another replica."""
            if not _here["engine"].alive:
                raise RuntimeError("the engine stopped")

        def __del__(self) -> None:
            engine = _here.pop("engine", None)
            if engine is not None:
                engine.drain(config.drain_seconds)
                engine.close()

    return Replica


_here: dict[str, Any] = {}
"""The engine of this process, where it is a replica."""


def stop() -> None:
    """Ends all replicas."""
    from ray import serve

    serve.shutdown()
