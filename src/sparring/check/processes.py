"""Memory, close() and the processes of an env, for `sparring check`."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from sparring.check.findings import ERROR, WARNING, Finding
from sparring.check.play import Player
from sparring.config.schema import Config
from sparring.config.text import shortened
from sparring.errors import StageFailed
from sparring.processes.heartbeat import OwnStage
from sparring.processes.memory import free_ram

_MARK = "SPARRING_CHECK"  # environment variable that marks processes of the env
_PART, _PART_S = 100, 0.6  # decisions and seconds of each of four parts of a run
_LEAK = 2**18  # bytes that memory grows in each part
_CLOSE_S, _LEAVE_S = 10.0, 2.0  # seconds for close(), and for its processes to end after it
_before = set[int]()  # processes that were there before the env


class Closable(Protocol):
    def close(self) -> None: ...


@contextmanager
def marked_processes() -> Iterator[None]:
    """Mark the processes that start within this context, by a variable of the environment that they inherit."""
    os.environ[_MARK] = f"{os.getpid()}-{time.monotonic_ns()}"
    _before.update(_descendants())
    try:
        yield
    finally:
        del os.environ[_MARK]
        _before.clear()


def memory_findings(player: Player, config: Config) -> Iterator[Finding]:
    """Step and reset without keeping anything: the memory of this process and its workers must not grow."""
    spec, grown, decisions = player.env.spec, [_resident()], 0
    actions = player.random_actions()
    for part in range(4):
        player.reset(part)
        deadline = time.monotonic() + _PART_S
        for action in islice(actions, _PART):
            player.env.step(player.td.set("action", torch.from_numpy(action)))
            decisions += 1
            if time.monotonic() > deadline:
                break
        grown.append(_resident())
    size = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in spec.observation.values())
    rollout = (config.rollout_steps + 1) * config.rollout.n_envs * size
    found = f"{_bytes(size)} an observation, {_bytes(rollout)} in a rollout of {config.rollout.n_envs} robots"
    growth = np.diff(grown[1:])
    if rollout > free_ram():
        fix = "use smaller or fewer images, rollout.n_envs or rollout.steps"
        yield Finding("memory", f"{found}, but only {_bytes(free_ram())} are free", WARNING, fix)
    elif growth.min() > _LEAK:
        each = growth.sum() / (decisions * 3 / 4)
        grows = f"it grew by {_bytes(growth.sum())} in {decisions * 3 // 4} decisions and 3 resets"
        fix = f"keep no data of earlier steps; 100,000 decisions would take {_bytes(1e5 * each)}"
        yield Finding("memory", grows, WARNING, fix)
    else:
        yield Finding("memory", f"{found}; no growth in {decisions} decisions")


def close_findings(opened: Sequence[Closable]) -> Iterator[Finding]:
    began = time.monotonic()
    fix = "end what the env started in close(), and wait for nothing"
    for each in opened:
        try:
            with OwnStage("close", 0, _CLOSE_S):
                each.close()
        except StageFailed:
            yield Finding("close", f"close() has not returned after {_CLOSE_S:g} s", ERROR, fix)
            return
        except (Exception, SystemExit) as error:  # as above
            yield Finding.of_error("close", error, fix)
            return
    took = time.monotonic() - began
    while (left := _processes()) and time.monotonic() < began + took + _LEAVE_S:
        time.sleep(0.05)
    if left:
        names = shortened(", ".join(dict.fromkeys(left.values())), 60)
        number = "1 process is" if len(left) == 1 else f"{len(left)} processes are"
        yield Finding("close", f"{number} left after close(): {names}", ERROR, fix)
    elif opened:
        yield Finding("close", f"{took:.1f} s, no process left")


def _processes() -> dict[int, str]:
    """The processes that envs of this one started; empty if the system has no /proc."""
    found, mark = dict[int, str](), f"{_MARK}={os.environ[_MARK]}".encode()
    # a forked process has the environment that this one began with, and one whose parent has ended has another parent
    known = _descendants() - _before
    # Python's own, which end with this process
    own = {os.getpid(), resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}  # type: ignore
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        with suppress(OSError):
            is_new = pid in known or mark in (entry / "environ").read_bytes().split(b"\0")
            if is_new and pid not in own and pid not in _before:
                found[pid] = (entry / "comm").read_text().strip()
    return found


def _descendants() -> set[int]:
    """The processes that this one and its children started, without those that have ended."""
    children = dict[int, list[int]]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # after the name, which may hold anything: state, parent
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, rest = set[int](), [os.getpid()]
    while rest:
        begun = children.get(rest.pop(), [])
        found.update(begun)
        rest += begun
    return found


def _resident() -> int:
    """Bytes of RAM of this process and of those that its envs started; 0 if unknown."""
    total = 0
    for pid in (os.getpid(), *_processes()):
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def _bytes(number: float) -> str:
    power = min(3, int(np.log10(max(number, 1)) // 3))
    return f"{number / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB')[power]}"
