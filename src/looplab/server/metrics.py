"""Counters of the engine and of HTTP as Prometheus text. Labels come from fixed sets, never from what clients write."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from looplab.engine.stats import EngineStats, Histogram

GAUGES = {
    "requests_resident": ("Choices that hold a seat.", "residents"),
    "kv_bytes": ("Bytes of the KV pool.", "kv_bytes"),
}
COUNTERS = {
    "refills": ("Rows at their first step that joined a queue with rows in it.", "refills"),
    "drafted_tokens": ("Tokens guessed at few steps.", "drafted_tokens"),
    "accepted_tokens": ("Guesses that full depth said too.", "accepted_tokens"),
    "draft_rounds": ("Times that guesses were confirmed.", "draft_rounds"),
    "numeric_errors": ("Requests that ended because of a number that is not finite.", "numeric_errors"),
    "graph_fallbacks": ("Launches that found no captured graph.", "graph_fallbacks"),
}
SECONDS = {
    "ttft": "From arrival to the first token.",
    "tpot": "Per token after the first, of a choice.",
    "request": "From arrival to the end.",
    "queue": "From arrival to the first prompt launch.",
}
QUEUES = ("waiting", "prefill", "ready", "coda", "stalled", "replay")
PAGES = ("free", "active", "cached", "quarantined")


class Metrics:
    """What `/metrics` says."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str]] = Counter()
        self._rejected: Counter[str] = Counter()

    def answered(self, route: str, status: int) -> None:
        """Counts an answer. `route` is that of the table of routes, or "other"."""
        self._requests[route, str(status)] += 1

    def rejected(self, code: str) -> None:
        """Counts an error by its code."""
        self._rejected[code] += 1

    def text(self, stats: EngineStats) -> bytes:
        """Everything, as of now."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(_Collector(self, stats))
        return generate_latest(registry)

    def families(self, stats: EngineStats) -> Iterator[Any]:
        """Every family of metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        requests = CounterMetricFamily("looplab_requests", "Answers by route and status.", labels=["route", "status"])
        for (route, status), count in sorted(self._requests.items()):
            requests.add_metric([route, status], count)
        yield requests
        for name, help, label, values in _labelled_counters(stats, self._rejected):
            yield _filled(CounterMetricFamily(f"looplab_{name}", help, labels=[label]), values)
        for name, help, label, values in _labelled_gauges(stats):
            yield _filled(GaugeMetricFamily(f"looplab_{name}", help, labels=[label]), values)
        for name, (help, field) in COUNTERS.items():
            yield CounterMetricFamily(f"looplab_{name}", help, value=getattr(stats, field))
        for name, (help, field) in GAUGES.items():
            yield GaugeMetricFamily(f"looplab_{name}", help, value=getattr(stats, field))
        yield from _speed(stats)
        yield from _histograms(stats)


class _Collector:
    """Hands the families to the library, which asks for them by this method."""

    def __init__(self, metrics: Metrics, stats: EngineStats):
        self._metrics, self._stats = metrics, stats

    def collect(self) -> Iterator[Any]:
        """Every family."""
        return self._metrics.families(self._stats)


def _filled(family: Any, values: Mapping[str, float | int]) -> Any:
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _labelled_counters(
    stats: EngineStats, rejected: Mapping[str, int]
) -> Iterator[tuple[str, str, str, Mapping[str, float | int]]]:
    miss = stats.prompt_tokens - stats.cached_tokens
    yield "rejected", "Errors by code.", "code", dict(sorted(rejected.items()))
    yield (
        "applications",
        "Core applications.",
        "kind",
        {
            "decode": stats.applications,
            "prefill": stats.prefill_applications,
        },
    )
    yield "applications_wasted", "Core applications that no token needed.", "cause", stats.wasted
    yield "launches", "Launches.", "stage", stats.launches
    yield "launch_rows", "Rows of launches; of prefill: tokens.", "stage", stats.launch_rows
    yield "launch_seconds", "Seconds inside launches.", "stage", stats.launch_seconds
    yield (
        "prefix_tokens",
        "Prompt tokens by whether the cache held them.",
        "result",
        {
            "hit": stats.cached_tokens,
            "miss": miss,
        },
    )
    yield "preemptions", "Choices put back because pages ran out.", "how", {"replay": stats.preemptions}
    yield (
        "tokens",
        "Tokens.",
        "kind",
        {
            "prompt": stats.prompt_tokens,
            "cached": stats.cached_tokens,
            "output": stats.output_tokens,
        },
    )


def _labelled_gauges(stats: EngineStats) -> Iterator[tuple[str, str, str, Mapping[str, float | int]]]:
    yield "queue_length", "Length of queues.", "queue", {name: getattr(stats, name) for name in QUEUES}
    yield "kv_pages", "Pages of the KV pool.", "state", {name: getattr(stats, f"{name}_pages") for name in PAGES}


def _speed(stats: EngineStats) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    helps = {
        "bound_ratio": "Most that the exits so far can gain over full depth.",
        "realised_fraction": "Model value: tokens per second over that bound times that of a cost model at full depth.",
    }
    for name, help in helps.items():
        value = getattr(stats, name)
        if value is not None:
            yield GaugeMetricFamily(f"looplab_{name}", help, value=value)


def _histograms(stats: EngineStats) -> Iterator[Any]:
    from prometheus_client.core import HistogramMetricFamily

    for name, help in SECONDS.items():
        found: Histogram = getattr(stats, f"{name}_seconds")
        yield HistogramMetricFamily(
            f"looplab_{name}_seconds", help, buckets=_cumulative(found.bounds, found.counts), sum_value=found.sum
        )
    steps, counts = zip(*stats.exit_steps, strict=True) if stats.exit_steps else ((), ())
    total = float(sum(step * count for step, count in stats.exit_steps))
    yield HistogramMetricFamily(
        "looplab_exit_steps", "Decoded tokens by steps.", buckets=_cumulative(steps, [*counts, 0]), sum_value=total
    )


def _cumulative(bounds: Any, counts: Any) -> list[tuple[str, float]]:
    """Counts per bucket as Prometheus wants them: how many were at most each bound."""
    total, buckets = 0.0, []
    for bound, count in zip([*(f"{float(bound):g}" for bound in bounds), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
