"""What torch's allocator gave out."""

import torch


def allocated(run):
    """Most bytes that torch's allocator had given out at once during a call, as the profiler tells it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    top = now = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top
