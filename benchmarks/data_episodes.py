"""How fast are windows of episodes read from the store on disk, compared with bare copies of as many bytes?

    python benchmarks/data_episodes.py [--quick] [--folder DIR]

Episodes have head and wrist cameras at 64 px, state, action, reward and a stored memory. Each way of sampling takes
turns with the limit: numpy slices of the same memory maps, as many bytes from random positions, copied into memory that
is allocated once. A step has two frames. One process, one thread, files in the page cache; `cold` reads right after the
files were dropped from the cache, and measures the disk.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import report
import torch
from tensordict import TensorDict

from sparring.data.episodes import EpisodeStore
from sparring.data.windows import MixedWindows, SequentialWindows, ShuffledWindows

CAMERAS = ("head", "wrist")
TARGET = 20_000
LENGTH, BATCH = 16, 32


def make_episode(steps: int, generator: torch.Generator) -> TensorDict:
    def noise(rows: int, *shape: int) -> torch.Tensor:
        return torch.rand(rows, *shape, generator=generator)

    images = {c: (noise(steps + 1, 3, 64, 64) * 256).to(torch.uint8) for c in CAMERAS}
    observation = TensorDict({"image": images, "state": noise(steps + 1, 24)}, [steps + 1])
    last = torch.arange(steps) == steps - 1
    outcome = {"reward": noise(steps, 1), "executed": torch.ones(steps, dtype=torch.int64)}
    outcome |= {"terminated": last, "truncated": last & False, "success": last}
    transition = {"action": noise(steps, 1, 8), "is_first": torch.arange(steps) == 0}
    transition |= {"memory": {"world_model": noise(steps, 256)}}
    outcome["observation"] = observation[1:]
    return TensorDict(transition | {"observation": observation[:-1], "next": outcome}, [steps])


def fill(store: EpisodeStore, episodes: int, steps: int) -> dict:
    """Time appending; four episodes repeat, since making them takes longer than storing them."""
    generator = torch.Generator().manual_seed(0)
    made = [make_episode(steps, generator) for _ in range(4)]
    started = time.perf_counter()
    for i in range(episodes):
        store.append(made[i % len(made)], source="random")
    store.flush()
    seconds = time.perf_counter() - started
    return {
        "steps_per_second": round(episodes * steps / seconds),
        "MB_per_second": round(store.bytes() / seconds / 1e6),
    }


class BareCopies:
    """The limit: copies random slices of the memory maps, as large as a batch of windows."""

    def __init__(self, store: EpisodeStore):
        # (bytes of a segment, offset of an episode in it)
        self.episodes = [(segment.bytes, record.offset) for segment, record in map(store.locate, range(len(store)))]
        steps = store.locate(0)[1].steps
        self.columns, self.starts, self.room = store.layout.columns, store.layout.offsets(steps), steps - LENGTH
        self.out = {c.name: np.empty((BATCH, (LENGTH + c.extra) * c.row_bytes), np.uint8) for c in self.columns}
        self.random = np.random.default_rng(0)

    def __call__(self) -> None:
        episodes = [self.episodes[i] for i in self.random.integers(len(self.episodes), size=BATCH).tolist()]
        firsts = self.random.integers(self.room + 1, size=BATCH).tolist()
        for column in self.columns:
            size, out, begin = column.row_bytes, self.out[column.name], self.starts[column.name]
            for row, (data, episode), first in zip(out, episodes, firsts, strict=True):
                start = episode + begin + first * size
                row[:] = data[start : start + len(row)]


def ways(store: EpisodeStore) -> dict[str, Callable[[], None]]:
    generator = torch.Generator().manual_seed(1)
    shuffled, burnt = ShuffledWindows(store, LENGTH, memory="stored"), ShuffledWindows(store, LENGTH - 4, burn_in=4)
    mixed = MixedWindows({ShuffledWindows(store, LENGTH): 0.7, ShuffledWindows(store, LENGTH, newest=8): 0.3})
    sequence = endless(SequentialWindows(store, LENGTH, BATCH))
    return {
        "bare copies": BareCopies(store),
        "shuffled": lambda: shuffled.sample(BATCH, generator),
        "shuffled, 4 of them burn-in": lambda: burnt.sample(BATCH, generator),
        "mixed": lambda: mixed.sample(BATCH, generator),
        "sequential": lambda: next(sequence),
    }


def endless(windows: SequentialWindows):
    while True:
        yield from windows


def seconds_of(sample: Callable[[], None], batches: int) -> float:
    started = time.perf_counter()
    for _ in range(batches):
        sample()
    return time.perf_counter() - started


def take_turns(sides: dict[str, Callable[[], None]], rounds: int, batches: int) -> dict[str, list[float]]:
    """Seconds of each side in every round; the order changes from round to round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for sample in sides.values():
        seconds_of(sample, batches)
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            times[name].append(seconds_of(sides[name], batches))
    return times


def cold(folder: Path, rounds: int, batches: int) -> list[float]:
    """Seconds of shuffled windows right after the files were dropped from the page cache."""
    times = []
    for number in range(rounds):
        # opening reads the last segment to check it
        windows = ShuffledWindows(EpisodeStore(folder, read_only=True), LENGTH)
        for path in folder.glob("*.data"):
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
        generator = torch.Generator().manual_seed(number)
        times.append(seconds_of(lambda w=windows, g=generator: w.sample(BATCH, g), batches))
    return times


def numbers(name: str, times: list[float], batches: int, limit: float) -> dict:
    seconds = statistics.median(times) / batches
    steps = BATCH * LENGTH / seconds
    return {
        "case": name,
        "steps_per_second": round(steps),
        "frames_per_second": round(steps * len(CAMERAS)),
        "of_the_limit": round(limit / seconds, 3),
        "milliseconds_per_batch": [round(1000 * t / batches, 2) for t in times],
    }


def measure(folder: Path, args) -> tuple[dict, list[dict]]:
    store = EpisodeStore(folder)
    appended = fill(store, args.episodes, args.steps)
    times = take_turns(ways(store), args.rounds, args.batches)
    store.close()
    # its memory maps would keep the files in memory
    del store
    limit = statistics.median(times["bare copies"]) / args.batches
    results = [numbers(name, seconds, args.batches, limit) for name, seconds in times.items()]
    # few batches: many would read all files into the cache again
    few = min(args.batches, 4)
    results.append(numbers("shuffled, cold", cold(folder, args.rounds, few), few, limit))
    return appended, results


def as_table(results: list[dict]) -> str:
    rows = [("windows", "steps/s", "frames/s", "of the limit", f"target {TARGET:,} frames/s")]
    for result in results:
        judged = result["case"] != "bare copies"
        met = ("met" if result["frames_per_second"] >= TARGET else "MISSED") if judged else ""
        steps, frames = f"{result['steps_per_second']:,}", f"{result['frames_per_second']:,}"
        rows.append((result["case"], steps, frames, f"{result['of_the_limit']:.2f}", met))
    return report.table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="timed turns of each way of sampling")
    parser.add_argument("--folder", type=Path, help="folder for about 1 GB of episodes; default: the temporary folder")
    parser.add_argument("--quick", action="store_true", help="check that it runs: tiny sizes, results not stored")
    args = parser.parse_args()
    args.episodes, args.steps, args.batches = (8, 40, 2) if args.quick else (400, 100, 20)
    args.rounds = 3 if args.quick else args.rounds
    torch.set_num_threads(1)
    about = report.metadata()
    about["sizes"] = {"episodes": args.episodes, "steps": args.steps, "batch": [BATCH, LENGTH], "rounds": args.rounds}
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        appended, results = measure(folder, args)
    finally:
        shutil.rmtree(folder)
    print(as_table(results))
    print(
        f"appending: {appended['steps_per_second']:,} steps/s, {appended['MB_per_second']:,} MB/s, flushed to the disk"
    )
    about["load_after"] = report.load()
    print(f"load before {about['load']}, after {about['load_after']}, {os.cpu_count()} cores")
    if not args.quick:
        content = {"about": about, "appending": appended, "results": results}
        report.write_json(report.RESULTS / "data_episodes.json", content)


if __name__ == "__main__":
    main()
