"""The collecting process of rollout.mode=async: it owns the robots and a copy of the policy, and fills rollouts.

Run as `python -m sparring.collect.remote.actor <fd>`, where fd is its end of a pipe to the learner. Rollout k begins
when the weights are of version k - staleness or newer, with the newest there are; the learner may ask for less
staleness than was agreed on at first. k's slot is k modulo (that + 1), which the learner is then done with. It ends
when the pipe is closed, as it also is when the learner dies.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from sparring.algorithms.scoring import Parity
from sparring.collect.collector import Stopwatch
from sparring.collect.remote.protocol import CLOSE_S, WATCHED, Begin, Failure, Report, TensorSlots, WeightsReader
from sparring.data.buffer import leaves
from sparring.errors import Diverged
from sparring.processes.child import connect_to_parent, error_report
from sparring.processes.distributed import exact_kernels, random_state, seed_everything, set_random_state
from sparring.processes.heartbeat import StageDeadlines
from sparring.processes.memory import Column, SharedHandle, SharedMemory

# what is left of a process in the middle of something to end in peace, after the learner hung up
_LEAVE_S = 1.0


class _HungUp(Exception):
    """The learner is not there any more."""


class _ActorPipe:
    """The pipe to the learner.

    A thread sends: a learner that is busy does not hold up the robots. Another one listens to what the learner says.
    """

    def __init__(self):
        self.version, self.staleness, self.videos, self.hung_up = -1, 0, 0, False
        # the process knows of its end, and closes the robots
        self.ending = False
        # closes them when the learner hangs up, whatever they are at
        self.close_robots: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._sender = ThreadPoolExecutor(1)
        self._pipe = connect_to_parent(self._leave)

    def send(self, message: Any) -> None:
        """As it is now; it may change before it is sent."""
        self._sender.submit(self._write, self._pipe.pack(message))

    def finish(self) -> None:
        """When all is sent, or nobody is there to read it."""
        self._sender.shutdown()

    def receive(self) -> Any:
        try:
            return self._pipe.receive()
        except (EOFError, OSError):
            raise _HungUp from None

    def listen(self, begin: Begin) -> None:
        """For notices, from now on."""
        self.version, self.staleness, self.videos = begin.number, begin.staleness, begin.videos
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_for_turn(self, number: int) -> None:
        """Until the rollout of this number may begin."""
        with self._changed:
            self._changed.wait_for(lambda: self.hung_up or self.version >= number - self.staleness)
        self.check()

    def check(self) -> None:
        if self.hung_up:
            raise _HungUp

    def take_video_request(self) -> int:
        with self._changed:
            videos, self.videos = self.videos, 0
        return videos

    def _write(self, packed: bytes) -> None:
        try:
            self._pipe.write(packed)
        except OSError:
            self._hang_up()

    def _listen(self) -> None:
        with suppress(_HungUp):
            while True:
                notice: dict[str, int] = self.receive()
                with self._changed:
                    vars(self).update(notice)
                    self._changed.notify()

    def _hang_up(self) -> None:
        with self._changed:
            self.hung_up = True
            self._changed.notify()

    def _leave(self) -> None:
        """Whoever waits for this process does not wait for robots in the middle of something."""
        self._hang_up()
        time.sleep(_LEAVE_S)
        closing = threading.Thread(target=self.close_robots, daemon=True)
        closing.start()
        closing.join(_LEAVE_S)
        if self.ending:
            closing.join(CLOSE_S - _LEAVE_S)


class _Actor:
    """`factory()` makes the collector, its buffer, and the scorer of the parity gate."""

    def __init__(self, pipe: _ActorPipe, factory: Any, deadlines: SharedHandle):
        rollout, folder = factory.config.rollout, factory.config.buffer.folder
        # folder: where rollouts lie; None: in RAM
        self.pipe, self.slots, self.folder = pipe, rollout.staleness + 1, Path(folder) if folder else None
        # [groups, len(WATCHED)]
        table = SharedMemory.attach(deadlines).arrays["deadlines",]
        self.deadlines = StageDeadlines(table, WATCHED, rollout.watchdog_s)
        self.collector, self.buffer, self.scorer = factory()
        self.device = self.collector.env.device
        for lane, collector in enumerate(self.collector.lanes):
            collector.stopwatch = self._watched_stopwatch(f"collector {lane}", lane)
        self.collector.stopwatch = self.stopwatch = self._watched_stopwatch("collector", 0)
        self.rollouts: SharedMemory | None = None
        self.states = TensorSlots(self.slots, self.folder)
        self._closing, self._closed = threading.Lock(), False
        self.deadlines.leave(0, "make")

    def _watched_stopwatch(self, who: str, lane: int) -> Stopwatch:
        """Shows by when each stage has to be over, and ends where the learner has gone."""

        def enter(stage: str) -> None:
            self.pipe.check()
            self.deadlines.enter(lane, stage)

        return Stopwatch(who, enter, partial(self.deadlines.leave, lane))

    def close(self) -> None:
        """Once, whoever asks first; the others wait for it."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self.collector.env.close()

    def load_state_dict(self, state: dict) -> bool:
        """Go on from the state of a report."""
        with self.stopwatch.stage("load", self.collector.version):
            set_random_state(state["random"], self.device)
            return self.collector.load_state_dict(state)

    def reseed(self, more: int) -> None:
        self.collector.reseed(more)

    def act(self, begin: Begin) -> None:
        """For ever."""
        collector, stopwatch = self.collector, self.stopwatch
        weights, number = WeightsReader(begin.weights, collector.policy), begin.number
        while True:
            with stopwatch.stage("wait", collector.version):
                self.pipe.wait_for_turn(number)
            with stopwatch.stage("load", collector.version):
                collector.version = weights.load()
            if videos := self.pipe.take_video_request():
                collector.record_video(videos)
            collector.collect(self.buffer)
            rollout = self.buffer.rollout()
            with stopwatch.stage("gate", collector.version):
                # before these weights are gone
                parity = self.scorer.replay(rollout, collector.version) if self.scorer else None
            with stopwatch.stage("share", collector.version):
                self._share(rollout, number)
            with stopwatch.stage("report", collector.version):
                self.pipe.send(self._report(number, parity, first=number == begin.number))
            number += 1

    def _share(self, rollout: TensorDict, number: int) -> None:
        if self.rollouts is None:
            # [slots, T, N, ...]
            shape = (self.slots, self.buffer.steps)
            columns = {key: Column((*shape, *value.shape[1:]), value.dtype) for key, value in leaves(rollout)}
            self.rollouts = SharedMemory.make(columns, self.folder)
            self.rollouts.pin(self.device)
        for key, value in leaves(rollout):
            self.rollouts.tensors[key][number % self.slots, : len(rollout)].copy_(value, non_blocking=True)
        self.rollouts.finish_copies()

    def _report(self, number: int, parity: Parity | None, first: bool) -> Report:
        collector, seconds = self.collector, self.stopwatch.seconds
        metrics = {f"{stage}_seconds": seconds[stage] for stage in ("collect", "wait")}
        metrics["handover_seconds"] = sum(seconds[stage] for stage in ("load", "gate", "share", "report"))
        busy, spans = collector.drain_stages()
        state = self.states.take_out(collector.state_dict() | {"random": random_state(self.device)}, number)
        done = (collector.version, len(self.buffer.rollout()), collector.env_steps, collector.env.spec)
        videos = [video.rendered() for video in collector.drain_videos()]
        played = (collector.drain_episodes(), videos, spans)
        rollouts = self.rollouts.handle if first else None
        states = self.states.shared.handle if first and self.states.shared else None
        return Report(number, *done, state, busy | metrics, parity, *played, rollouts, states)


def _serve(pipe: _ActorPipe) -> None:
    """Make the robots, answer calls, then collect until the learner hangs up; the last message is what went wrong."""
    actor = None
    try:
        factory, deadlines = pipe.receive()
        exact_kernels()
        torch.set_num_threads(factory.config.threads or 1)
        seed_everything(factory.random_seed)
        _go_first(factory.device)
        actor = _Actor(pipe, factory, deadlines)
        pipe.close_robots = actor.close
        pipe.send(actor.collector.env.spec)
        while not isinstance(message := pipe.receive(), Begin):
            method, arguments = message
            pipe.send(getattr(actor, method)(*arguments))
        pipe.listen(message)
        actor.act(message)
    except _HungUp:
        return
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # whatever somebody else's robots and policy raise
        (what, trace), diverged = error_report(error), isinstance(error, Diverged)
        collectors = [*actor.collector.lanes, actor.collector] if actor else []
        stages = [collector.stopwatch.failed for collector in collectors]
        pipe.send(Failure(what, next(filter(None, stages), "wait") if actor else "make", trace, diverged))
        pipe.finish()
    finally:
        pipe.ending = True
        if actor:
            actor.close()


def _go_first(device: torch.device) -> None:
    """On a GPU that acts and learns, acting comes first: robots wait for it, and it is short. (Where MPS runs.)"""
    if device.type == "cuda":
        # lower numbers are served first; usual streams have 0
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))


def _main() -> None:
    pipe = _ActorPipe()
    # the learner keeps what is said here in its log of envs
    logging.basicConfig(format="%(levelname)s %(message)s")
    logging.getLogger("sparring").setLevel(logging.DEBUG)
    _serve(pipe)
    # threads that simulate may still be at it
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
