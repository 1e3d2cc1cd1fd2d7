"""How long does an update take with synchronous and asynchronous collection, and how fast could it be at most?

No run is faster than its busiest resource, and no stage is faster than with the complete machine. Hence

    bound (largest speedup) = synchronous time / max(simulate, infer, learn, CPU seconds / cores)

On a GPU, GPU seconds are another term of the maximum (async_vla.py). The synchronous time is that of the fastest of
several settings, including groups of robots, which overlap simulation and inference. Each term of the maximum is its
minimum over these settings, because waiting threads consume CPU time that the work does not need.
"""

import os
import time
from dataclasses import dataclass, field

STAGES = ("simulate", "infer", "learn")
ROUNDS = 3


@dataclass(frozen=True)
class Timing:
    """Means over updates, in seconds per update."""

    settings: list[str]
    seconds: float
    stages: dict[str, float]
    metrics: dict[str, float]
    # sum over all threads of this process
    cpu_seconds: float
    spans: list = field(repr=False)

    def as_dict(self) -> dict:
        values = {"settings": self.settings, "seconds": round(self.seconds, 4)}
        values |= {"stages": _rounded(self.stages), "metrics": _rounded(self.metrics)}
        return values | {"cpu_seconds": round(self.cpu_seconds, 4)}


def time_updates(settings: list[str], updates: int, warm_up: int) -> Timing:
    """Time `updates` updates after `warm_up` untimed ones."""
    import torch

    from sparring.config.schema import load_config
    from sparring.config.text import parse_overrides
    from sparring.phases.finetune import Finetune
    from sparring.processes.distributed import Distributed

    config = load_config(None, parse_overrides(["phase=finetune", "rollout.render_episodes=0", *settings]))
    torch.set_num_threads(config.threads or 1)
    phase = Finetune.from_config(config, Distributed(config.device))
    try:
        for _ in range(warm_up):
            phase.step(0.5)
        phase.drain_spans()
        began, busy = time.perf_counter(), time.process_time()
        rows = [phase.step(0.5) for _ in range(updates)]
        seconds, busy = (time.perf_counter() - began) / updates, (time.process_time() - busy) / updates
        spans = phase.drain_spans()
    finally:
        phase.env.close()
    means = {name: sum(row[name] for row in rows) / updates for name in rows[-1] if all(name in row for row in rows)}
    stages = {stage: means[f"{'update' if stage == 'learn' else stage}_seconds"] for stage in STAGES}
    names = ("collect_seconds", "staleness", "ess", "learner_idle", "actor_idle", "queue_depth", "approx_kl")
    return Timing(settings, seconds, stages, {n: means[n] for n in names if n in means}, busy, spans)


def compare(base: list[str], sync: list[list[str]], asynchronous: list[list[str]], count: int, warm_up: int) -> dict:
    """The fastest synchronous and asynchronous setting, the largest possible speedup, and the share reached."""
    sync = [[*base, *more] for more in sync]
    overlapped = [[*base, "rollout.mode=async", *more] for more in asynchronous]
    # settings take turns and the best round of each counts, so that a slow period of the machine favours none
    rounds = [[time_updates(settings, count, warm_up) for settings in (*sync, *overlapped)] for _ in range(ROUNDS)]
    timings = [min(repeats, key=lambda timing: timing.seconds) for repeats in zip(*rounds, strict=True)]
    sync, overlapped = timings[: len(sync)], timings[len(sync) :]
    best_sync, best_async = (min(tried, key=lambda timing: timing.seconds) for tried in (sync, overlapped))
    cores = len(os.sched_getaffinity(0))
    needed = [min(timing.stages[stage] for timing in sync) for stage in STAGES]
    needed.append(min(timing.cpu_seconds for timing in sync) / cores)
    bound, gain = best_sync.seconds / max(needed), best_sync.seconds / best_async.seconds
    return {
        "cores": cores,
        "sync": best_sync.as_dict(),
        "async": best_async.as_dict(),
        "tried": [timing.as_dict() for timing in timings],
        "bound": round(bound, 3),
        "gain": round(gain, 3),
        "of_bound": round(gain / bound, 3),
        "overlap": overlaps(best_async.spans),
        "spans": [vars(span) for span in best_async.spans],
    }


def overlaps(spans: list) -> dict[str, float]:
    """For simulation and inference, the share of the learning time during which they were active."""
    learning = _merged([(s.begin, s.end) for s in spans if s.stage == "learn"])
    length = sum(end - begin for begin, end in learning)
    shares = {}
    for stage in ("simulate", "infer"):
        others = _merged([(s.begin, s.end) for s in spans if s.stage == stage])
        overlapped = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in learning for b in others)
        shares[stage] = round(overlapped / length, 3) if length else 0.0
    return shares


def _merged(parts: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of the intervals, as intervals that do not overlap."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(parts):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def gpu_seconds(work) -> float:
    """Seconds of the kernels of `work`. Call it last: profiling slows later kernel launches of this process."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(number, 4) for name, number in numbers.items()}
