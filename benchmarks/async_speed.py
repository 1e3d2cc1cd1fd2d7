"""How long an update takes, in turns and at the same time, and how much faster it could be at best.

Nothing is faster than its busiest resource, and no stage than it is with the whole machine for itself, so that

    bound = synchronous time / max(simulate, infer, learn, CPU seconds / cores)

where a GPU's seconds count too (async_vla.py). Synchronous time is that of the fastest of several runs that use the
machine differently, groups of robots among them (which overlap simulating and deciding in turns with learning, too).
What it is divided by is of each the least that any of these runs took: threads that wait for each other burn time that
the work does not need.
"""

import os
import time
from dataclasses import dataclass, field

STAGES = ("simulate", "infer", "learn")
ROUNDS = 3


@dataclass(frozen=True)
class Timing:
    """Of an update, mean seconds."""

    settings: list[str]
    seconds: float
    stages: dict[str, float]
    metrics: dict[str, float]
    # of all threads of this process
    cpu_seconds: float
    spans: list = field(repr=False)

    def as_dict(self) -> dict:
        values = {"settings": self.settings, "seconds": round(self.seconds, 4)}
        values |= {"stages": _rounded(self.stages), "metrics": _rounded(self.metrics)}
        return values | {"cpu_seconds": round(self.cpu_seconds, 4)}


def time_updates(settings: list[str], updates: int, warm_up: int) -> Timing:
    """`updates` of them after `warm_up`."""
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


def compare(base: list[str], in_turns: list[list[str]], at_once: list[list[str]], updates: int, warm_up: int) -> dict:
    """The fastest of each, the bound, and what part of it is reached."""
    sync = [[*base, *more] for more in in_turns]
    both = [[*base, "rollout.mode=async", *more] for more in at_once]
    # in turns, and the best of each: a machine that is slow for a while favours none
    rounds = [[time_updates(settings, updates, warm_up) for settings in (*sync, *both)] for _ in range(ROUNDS)]
    timings = [min(tries, key=lambda timing: timing.seconds) for tries in zip(*rounds, strict=True)]
    sync, both = timings[: len(sync)], timings[len(sync) :]
    best, other = (min(tried, key=lambda timing: timing.seconds) for tried in (sync, both))
    cores = len(os.sched_getaffinity(0))
    needed = [min(timing.stages[stage] for timing in sync) for stage in STAGES]
    needed.append(min(timing.cpu_seconds for timing in sync) / cores)
    bound, gain = best.seconds / max(needed), best.seconds / other.seconds
    return {
        "cores": cores,
        "sync": best.as_dict(),
        "async": other.as_dict(),
        "tried": [timing.as_dict() for timing in timings],
        "bound": round(bound, 3),
        "gain": round(gain, 3),
        "of_bound": round(gain / bound, 3),
        "overlap": overlaps(other.spans),
        "spans": [vars(span) for span in other.spans],
    }


def overlaps(spans: list) -> dict[str, float]:
    """The share of the time of learning in which a robot was simulated, and in which one was decided for."""
    learning = _merged([(s.begin, s.end) for s in spans if s.stage == "learn"])
    length = sum(end - begin for begin, end in learning)
    shares = {}
    for stage in ("simulate", "infer"):
        others = _merged([(s.begin, s.end) for s in spans if s.stage == stage])
        both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in learning for b in others)
        shares[stage] = round(both / length, 3) if length else 0.0
    return shares


def _merged(parts: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time, in parts that do not overlap."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(parts):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def gpu_seconds(work) -> float:
    """Of its kernels. What launches kernels in this process afterwards is slower: ask last."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(number, 4) for name, number in numbers.items()}
