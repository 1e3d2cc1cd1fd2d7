"""Records scripted experts: many robots at once, in several processes; resumes an interrupted recording.

The number of a block determines its episodes, and their seeds determine what happens in them: any process may record
any block at any time, with the same bytes as the result. A block gets its final name only when it is complete.

outputs/demos/lift_d0/recording/   blocks of episodes, see EpisodeBlock; removed when the dataset is complete
outputs/demos/lift_d0/meta, data, videos
"""

import fcntl
import json
import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from sparring.config.text import flatten
from sparring.contract import EnvSpec
from sparring.data.dataset import read_dataset
from sparring.data.lerobot import INFO, RECORDING
from sparring.data.statistics import pixel_counts
from sparring.data.tables import parquet, read_json
from sparring.data.video import encode, find_ffmpeg
from sparring.demos.assemble import PARTS, EpisodeBlock, assemble, write_json
from sparring.demos.plan import Plan, image_shapes
from sparring.envs.backend import Arrays, EpisodeSeeds
from sparring.errors import UserError
from sparring.processes.child import usable_cores
from sparring.processes.files import flush, refuse_links_out, refuse_special
from sparring.processes.manifest import MANIFEST, entry, write_manifest
from sparring.record.log import Console

log = logging.getLogger(__name__)

_SETTINGS = "settings.json"
# give up if no episode succeeds in this number of tries
_MOST_FAILURES = 128
# limit in seconds for the recording of a block by one of several workers
_BLOCK_S = 7200.0


def record(plan: Plan, episodes: int, output: Path, workers: int = 1, quiet: bool = False) -> dict[str, Any]:
    """Record a dataset of exactly `episodes` episodes in `output`; returns the content of its meta/sparring.json."""
    # missing packages and experts raise here, before anything is written and before workers start
    parquet()
    env = plan.make_env(len(plan.tasks))
    spec = env.spec
    env.close()
    if any(name.startswith("image/") for name in spec.observation):
        find_ffmpeg()
    robots = plan.robots(spec)
    extras = output / "meta/sparring.json"
    # a complete dataset is never changed; earlier versions wrote no manifest
    if (output / INFO).exists() and ((output / MANIFEST).exists() or not (output / RECORDING / _SETTINGS).exists()):
        if not extras.exists():
            raise UserError(f"'{output}' holds a dataset from another program; give another --output")
        saved = read_dataset(output).extras
        _refuse_other_settings(output, saved, plan.settings())
        if (there := len(saved["episode_seeds"])) != episodes:
            raise UserError(f"'{output}' is complete with {there} episodes; give another --output")
        shutil.rmtree(output / RECORDING, ignore_errors=True)
        return saved
    console = Console(quiet=quiet)
    try:
        with _held(output / RECORDING, plan, robots) as folder:
            needed = _record_blocks(plan, spec, episodes, folder, workers, console)
            assemble(output, plan, _read_blocks(folder, needed), episodes)
        shutil.rmtree(output / RECORDING)
    except OSError as error:
        raise UserError(f"--output '{output}' cannot be written ({error.strerror or error})") from None
    finally:
        console.end()
    return json.loads(extras.read_text())


def _record_blocks(plan: Plan, spec: EnvSpec, episodes: int, folder: Path, workers: int, console: Console) -> int:
    """Record blocks until the first blocks hold enough episodes; returns the number of these blocks."""
    robots, steps = plan.robots(spec), spec.max_episode_steps
    kept = _recorded_before(folder)
    found, doing = sum(kept.values()), "resuming" if kept else "compiling and recording the first episodes"
    console.progress(min(found / episodes, 1), len(kept) * robots * steps, doing)
    with _recorders(plan, robots, folder, workers) as start:
        running: set[Future] = set()
        next_block, room_checked = 0, False
        while (needed := _first_enough(kept, episodes)) is None:
            # do not start a block that is probably not needed
            while not running or (len(running) < workers and found + len(running) * robots < episodes):
                if next_block not in kept:
                    running.add(start(next_block))
                next_block += 1
            done, running = wait(running, _BLOCK_S if workers > 1 else None, FIRST_COMPLETED)
            if not done:
                # else the pool waits for them
                for process in multiprocessing.active_children():
                    process.kill()
                raise UserError(f"no worker process has recorded a block in {_BLOCK_S:g} seconds; try fewer --workers")
            kept.update(future.result() for future in done)
            found, tried = sum(kept.values()), len(kept) * robots
            if not found and tried >= _MOST_FAILURES:
                mode = getattr(plan.env, "control_mode", None)
                how = ", ".join(
                    [*([f"control mode {mode}"] if mode else []), f"noise {plan.noise:g}", f"{steps} steps"]
                )
                another = "another --control-mode, " if mode else ""
                raise UserError(
                    f"the expert failed in all of {tried} episodes of {', '.join(plan.tasks)} ({how}); try {another}"
                    "less --noise or a larger rollout.max_episode_steps"
                )
            console.progress(min(found / episodes, 1), tried * steps, _progress(found, tried, episodes))
            if found and not room_checked:
                _refuse_without_room(folder, found, episodes)
                room_checked = True
    return needed


def _read_blocks(folder: Path, needed: int) -> list[EpisodeBlock]:
    blocks = []
    for number in range(needed):
        if (block := EpisodeBlock.read(folder, number)) is None:
            advice = "run the same command again to record it again"
            raise UserError(f"block {number} in '{folder}' was damaged after it was recorded; {advice}")
        blocks.append(block)
    return blocks


def _recorded_before(folder: Path) -> dict[int, int]:
    """Block -> episodes kept in it; a block that cannot be read is recorded again."""
    kept = {}
    for path in sorted(folder.glob("block-??????")):
        number = int(path.name[-6:])
        if (block := EpisodeBlock.read(folder, number)) is None:
            log.warning("'%s' is damaged and is recorded again", path)
            shutil.rmtree(path)
        else:
            kept[number] = len(block.numbers["number"])
    return kept


def _first_enough(kept: dict[int, int], episodes: int) -> int | None:
    """The number of first blocks that hold enough episodes; None: there are too few, or one of them is missing."""
    found = 0
    for number in takewhile(kept.__contains__, count()):
        found += kept[number]
        if found >= episodes:
            return number + 1
    return None


def _progress(found: int, tried: int, episodes: int) -> str:
    """The progress in episodes; surplus episodes of the last block do not count."""
    failed = f", {tried - found} failed" if tried > found else ""
    return f"{min(found, episodes)} of {episodes} episodes{failed}"


def _refuse_without_room(folder: Path, found: int, episodes: int) -> None:
    """Estimate the disk space from the recorded blocks; at the end, blocks and dataset exist at the same time."""
    each = sum(file.stat().st_size for file in folder.glob("block-??????/*")) / found
    needed, free = each * (max(episodes - found, 0) + episodes), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{episodes} episodes of about {each / 1e6:.2f} MB need {needed / 1e9:,.1f} GB more for recording and "
            f"dataset, but '{folder.parent}' has {free / 1e9:,.1f} GB free; free some space and run the same command "
            "again, or use fewer --episodes"
        )


@contextmanager
def _recorders(plan: Plan, robots: int, folder: Path, workers: int) -> Iterator:
    """Yields a function that starts to record a block and returns a Future of (number, kept episodes)."""
    if workers == 1:
        recorder = _BlockRecorder(plan, robots, folder)
        with ThreadPoolExecutor(1) as pool:
            yield lambda number: pool.submit(recorder, number)
        return
    if getattr(plan.env, "threads", None) == 0:
        plan = replace(plan, env=plan.env.model_copy(update={"threads": usable_cores(workers)}))
    try:
        # a forked process would inherit the threads of simulator and numba in an unknown state
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (plan, robots, folder)) as pool:
            yield lambda number: pool.submit(_record, number)
    except BrokenProcessPool:
        why = "a worker process died (out of memory?); the same command resumes, try fewer --workers"
        raise UserError(why) from None


class _BlockRecorder:
    """Records blocks of a plan into `folder`, all with the same env."""

    def __init__(self, plan: Plan, robots: int, folder: Path):
        self._plan, self._folder = plan, folder
        self._robots, self._env = robots, plan.make_env(robots)
        self._vectors = [name for name in ("state", "privileged", "points") if name in self._env.spec.observation]

    def __call__(self, number: int) -> tuple[int, int]:
        """Record a block; returns its number and the number of kept episodes."""
        seeds = EpisodeSeeds(self._plan.seed, first_env=number * self._robots, total_envs=self._robots)
        tracks, lengths, success, tasks = self._play(seeds)
        kept = np.flatnonzero(success | self._plan.keep_failures)
        numbers = {"number": seeds.first_env + kept}
        for name, texts in zip(("task", "instruction"), zip(*tasks, strict=True), strict=True):
            numbers[name] = np.array(texts)[kept]
        numbers |= {"success": success[kept], "length": lengths[kept]}
        numbers["seed"] = np.array([seeds(int(row), 0) for row in kept], np.int64)
        for name in (*self._vectors, "action", "reward"):
            parts = [tracks[name][: lengths[row], row] for row in kept]
            # the empty first part sets shape and dtype if no episode is kept
            numbers[name] = np.concatenate([tracks[name][:0, 0], *parts])
        self._write(number, numbers, tracks, lengths, kept)
        return number, len(kept)

    def _play(self, seeds: EpisodeSeeds) -> tuple[Arrays, np.ndarray, np.ndarray, list[tuple[str, str]]]:
        """Play one episode per robot: observations, actions and rewards `[T, N, ...]`; lengths and successes `[N]`;
        task and instruction of each robot."""
        env, steps, robots = self._env, self._env.spec.max_episode_steps, self._robots
        shapes = env.spec.observation | {"action": ((env.spec.action_dim,), "float32"), "reward": ((), "float32")}
        tracks = {name: np.empty((steps, robots, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        lengths, success = np.zeros(robots, np.int64), np.zeros(robots, bool)
        observation = env.reset(seeds)
        tasks = env.tasks(observation)
        for t in range(steps):
            # record the float32 that the robots execute
            action = env.expert().astype(np.float32)
            step = env.step(action)
            for name, values in (observation | {"action": action[:, 0], "reward": step.reward[:, 0]}).items():
                tracks[name][t] = values
            # robots with shorter episodes start another one, which is not recorded
            first = step.ended[lengths[step.ended] == 0]
            lengths[first], success[first] = t + 1, step.success[first]
            if lengths.all():
                break
            observation = step.observation
        return tracks, lengths, success, tasks

    def _write(self, number: int, numbers: Arrays, tracks: Arrays, lengths: np.ndarray, kept: np.ndarray) -> None:
        block = EpisodeBlock(self._folder, number, numbers)
        partial = block.path.with_name(f"{block.path.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        fps = int(self._env.spec.control_hz)
        for camera in image_shapes(self._env.spec):
            counts = np.zeros((len(kept), 3, 256), np.int64)
            for k, row in enumerate(kept):
                # [T, 3, H, W] -> [T, H, W, 3]
                frames = tracks[f"image/{camera}"][: lengths[row], row].transpose(0, 2, 3, 1)
                counts[k] = pixel_counts(frames)
                encode(partial / block.clip(k, camera).name, frames, fps, self._plan.pixel_format)
            numbers[f"pixels/{camera}"] = counts
        np.savez(partial / "numbers.npz", **numbers)  # type: ignore[arg-type]
        flush(partial, tree=True)
        write_manifest(partial, "episodes", {file.name: entry(file) for file in sorted(partial.iterdir())})
        os.replace(partial, block.path)
        flush(self._folder)


_recorder: _BlockRecorder  # in a worker process


def _begin(plan: Plan, robots: int, folder: Path) -> None:
    """Initialise a worker process; the parent handles Ctrl-C."""
    global _recorder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _recorder = _BlockRecorder(plan, robots, folder)


def _record(number: int) -> tuple[int, int]:
    return _recorder(number)


@contextmanager
def _held(folder: Path, plan: Plan, robots: int) -> Iterator[Path]:
    """The folder of a recording, locked for this process; refuses settings other than its first ones."""
    settings, output = folder / _SETTINGS, folder.parent
    there = [name for name in PARTS if (output / name).exists()]
    # assembly deletes these folders, so they must be from an interrupted assembly
    if there and not settings.exists():
        raise UserError(f"'{output}' holds {', '.join(there)} that this command did not write; give another --output")
    folder.mkdir(parents=True, exist_ok=True)
    refuse_links_out(folder.parent)
    refuse_special(folder / "lock")
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"'{output}' is being recorded by another process; wait for it") from None
        # the number of robots belongs to the settings: it determines the episodes of a block
        now = plan.settings() | {"robots": robots}
        if settings.exists():
            _refuse_other_settings(output, read_json(settings), now)
        else:
            write_json(settings, now)
        for partial in folder.glob("block-*.partial-*"):
            shutil.rmtree(partial)
        yield folder


def _refuse_other_settings(output: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    saved, now = flatten(saved), flatten(now)
    changed = [f"  {key}: {saved.get(key)} there, {value} now" for key, value in now.items() if saved.get(key) != value]
    if changed:
        first = f"'{output}' holds a recording with other settings; give another --output:"
        raise UserError("\n".join([first, *changed]))
