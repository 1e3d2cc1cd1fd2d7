"""Records scripted experts: many robots at once, in several processes, going on where it was stopped.

outputs/demos/lift_d0/recording/   blocks of episodes, see block.py; gone when the dataset is complete
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
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparring.config.text import flatten
from sparring.data.lerobot import RECORDING, parquet
from sparring.data.video import find_ffmpeg
from sparring.demos.assemble import PARTS, BlockRecorder, assemble, block_folder, read_block
from sparring.demos.plan import Plan
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.experts import Expert
from sparring.errors import UserError
from sparring.processes.child import share_of_cores
from sparring.processes.files import flush
from sparring.record.console import Console

log = logging.getLogger(__name__)

# an expert that has not managed one episode by then never will
_PATIENCE = 128


def record(plan: Plan, episodes: int, output: Path, workers: int = 1, quiet: bool = False) -> dict[str, Any]:
    """A dataset of exactly so many episodes in `output`; what its meta/sparring.json holds."""
    _check(plan)
    told = output / "meta/sparring.json"
    if (output / "meta/info.json").exists():
        _refuse_another(output, told, plan, episodes)
        shutil.rmtree(output / RECORDING, ignore_errors=True)
        return json.loads(told.read_text())
    console = Console(quiet=quiet)
    try:
        with _held(output / RECORDING, plan) as folder:
            blocks = _record_blocks(plan, episodes, folder, workers, console)
            assemble(output, plan, [read_block(block_folder(folder, number)) for number in range(blocks)], episodes)
        shutil.rmtree(output / RECORDING)
    except OSError as error:
        raise UserError(f"--output '{output}': cannot write there ({error.strerror or error})") from None
    finally:
        console.end()
    return json.loads(told.read_text())


def _check(plan: Plan) -> None:
    """What is missing is said before anything is written, by this process and not by a worker."""
    parquet()
    find_ffmpeg()
    env = Tabletop(plan.env, len(plan.env.task), plan.max_episode_steps)
    Expert(env)
    env.close()


def _record_blocks(plan: Plan, episodes: int, folder: Path, workers: int, console: Console) -> int:
    """Have blocks recorded until the first ones hold enough episodes; how many these are."""
    kept = _recorded_before(folder)
    found = sum(kept.values())
    doing = "going on" if kept else "compiling and recording the first episodes"
    console.progress(min(found / episodes, 1), len(kept) * plan.robots * plan.steps, doing)
    with _recorders(plan, folder, workers) as start:
        running, next_block, room_checked = set(), 0, False
        while (needed := _first_enough(kept, episodes)) is None:
            # none is begun that will hardly be needed
            while not running or (
                len(running) < workers and sum(kept.values()) + len(running) * plan.robots < episodes
            ):
                if next_block not in kept:
                    running.add(start(next_block))
                next_block += 1
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                kept[future.result()] = read_block(block_folder(folder, future.result())).kept
            _show(console, kept, plan, episodes)
            if not room_checked and sum(kept.values()):
                _refuse_without_room(folder, sum(kept.values()), episodes)
                room_checked = True
    return needed


def _recorded_before(folder: Path) -> dict[int, int]:
    """Block -> episodes kept in it; a block that cannot be read is recorded again."""
    kept = {}
    for path in sorted(folder.glob("block-??????")):
        block = read_block(path)
        if block is None:
            log.warning("'%s' is damaged and is recorded again", path)
            shutil.rmtree(path)
        else:
            kept[int(path.name[-6:])] = block.kept
    return kept


def _first_enough(kept: dict[int, int], episodes: int) -> int | None:
    """How many of the first blocks hold enough episodes; None: not yet, or one among them is still missing."""
    found = 0
    for number in range(len(kept)):
        if number not in kept:
            return None
        found += kept[number]
        if found >= episodes:
            return number + 1
    return None


def _show(console: Console, kept: dict[int, int], plan: Plan, episodes: int) -> None:
    tried, found = len(kept) * plan.robots, sum(kept.values())
    if not found and tried >= _PATIENCE:
        raise UserError(
            f"the expert managed none of {tried} episodes of {', '.join(plan.env.task)} (control mode "
            f"{plan.env.control_mode}, noise {plan.noise:g}, {plan.steps} steps); try another --control-mode, less "
            "--noise or a larger rollout.max_episode_steps"
        )
    console.progress(min(found / episodes, 1), tried * plan.steps, _progress(found, tried, episodes))


def _progress(found: int, tried: int, episodes: int) -> str:
    """In the numbers of the end: more of a block than is needed is nobody's business."""
    failed = f", {tried - found} failed" if tried > found else ""
    return f"{min(found, episodes)} of {episodes} episodes{failed}"


def _refuse_without_room(folder: Path, found: int, episodes: int) -> None:
    """By the size of what is recorded; at the end blocks and dataset lie beside each other for a moment."""
    each = sum(file.stat().st_size for file in folder.glob("block-??????/*")) / found
    needed, free = each * (max(episodes - found, 0) + episodes), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{episodes} episodes of about {each / 1e6:.2f} MB need {needed / 1e9:,.1f} GB more until they are a "
            f"dataset, but '{folder.parent}' has {free / 1e9:,.1f} GB free; make room and give the same command "
            "again, or fewer --episodes"
        )


@contextmanager
def _recorders(plan: Plan, folder: Path, workers: int) -> Iterator:
    """A function that starts the recording of a block and returns a Future of its number."""
    if workers == 1:
        recorder = BlockRecorder(plan, folder)
        with ThreadPoolExecutor(1) as pool:
            yield lambda number: pool.submit(recorder, number)
        return
    if not plan.env.threads:
        threads = share_of_cores(workers)
        plan = replace(plan, env=plan.env.model_copy(update={"threads": threads}))
    # a forked process would inherit the threads of simulator and numba in an unknown state
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, spawn, _begin, (plan, folder)) as pool:
            yield lambda number: pool.submit(_record, number)
    except BrokenProcessPool:
        raise UserError(
            "a worker process died (out of memory?); the same command goes on, try fewer --workers"
        ) from None


_recorder: BlockRecorder | None = None


def _begin(plan: Plan, folder: Path) -> None:
    """In a worker process. Ctrl-C is the parent's business."""
    global _recorder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _recorder = BlockRecorder(plan, folder)


def _record(number: int) -> int:
    return _recorder(number)


@contextmanager
def _held(folder: Path, plan: Plan) -> Iterator[Path]:
    """The folder of a recording, for this process alone, with the settings it began with."""
    if not (folder / "settings.json").exists():
        _refuse_what_others_wrote(folder.parent)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"'{folder.parent}' is being recorded by another process; wait for it") from None
        settings = folder / "settings.json"
        # which episodes a block holds follows from its number and the robots
        now = plan.settings() | {"robots": plan.robots}
        if settings.exists():
            _refuse_other_settings(folder.parent, json.loads(settings.read_text()), now)
        else:
            partial = settings.with_suffix(".partial")
            partial.write_text(json.dumps(now, indent=2))
            flush(partial)
            os.replace(partial, settings)
            flush(folder)
        for partial in folder.glob("block-*.partial-*"):
            shutil.rmtree(partial)
        yield folder


def _refuse_what_others_wrote(output: Path) -> None:
    """What an interrupted assembly left is deleted, so nothing else may lie there."""
    there = [name for name in PARTS if (output / name).exists()]
    if there:
        raise UserError(f"'{output}' holds {', '.join(there)} of something else; give another --output")


def _refuse_another(output: Path, told: Path, plan: Plan, episodes: int) -> None:
    """A finished dataset is never changed."""
    if not told.exists():
        raise UserError(f"'{output}' holds a dataset that was not recorded here; give another --output")
    saved = json.loads(told.read_text())
    _refuse_other_settings(output, saved, plan.settings())
    if len(saved["episode_seeds"]) != episodes:
        raise UserError(f"'{output}' is complete with {len(saved['episode_seeds'])} episodes; give another --output")


def _refuse_other_settings(output: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    saved, now = flatten(saved), flatten(now)
    changed = [f"  {key}: {saved.get(key)} there, {value} now" for key, value in now.items() if saved.get(key) != value]
    if changed:
        raise UserError(
            "\n".join([f"'{output}' holds a recording with other settings; give another --output:", *changed])
        )
