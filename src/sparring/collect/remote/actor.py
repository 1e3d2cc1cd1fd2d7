"""The actor process of rollout.mode=async: it has the env and a copy of the policy, and collects rollouts.

Run as `python -m sparring.collect.remote.actor <fd>`, where fd is its end of a pipe to the learner. Rollout k starts
as soon as weights of version (k - staleness) or newer are published, and uses the newest version. The learner may
reduce the staleness later. Rollout k is written to slot k modulo (initial staleness + 1): before it starts, the learner
has finished with the earlier rollout in that slot. The process ends when the pipe closes, e.g. if the learner dies.
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

# timeout for the running stage to end after the learner disconnected, and then for the env to close
_STOP_S = 1.0


class _Disconnected(Exception):
    """The learner closed the pipe or died."""


class _ActorPipe:
    """The pipe to the learner.

    One thread sends, so that a busy learner does not delay the robots. Another one receives messages.
    """

    def __init__(self):
        self.version, self.staleness, self.videos, self.disconnected = -1, 0, 0, False
        # whether the main thread is ending and closes the env itself
        self.ending = False
        # closes the env if the learner disconnects, in any stage
        self.close_env: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._sender = ThreadPoolExecutor(1)
        self._pipe = connect_to_parent(self._stop)

    def send(self, message: Any) -> None:
        """Send the message in its current state; packed here, because it may change before it is written."""
        self._sender.submit(self._write, self._pipe.pack(message))

    def finish(self) -> None:
        """Wait until all messages are sent, or the learner has disconnected."""
        self._sender.shutdown()

    def receive(self) -> Any:
        try:
            return self._pipe.receive()
        except (EOFError, OSError):
            raise _Disconnected from None

    def start_receiving(self, begin: Begin) -> None:
        """Receive changes of `version`, `staleness` and `videos` in a thread from now on."""
        self.version, self.staleness, self.videos = begin.number, begin.staleness, begin.videos
        threading.Thread(target=self._receive_changes, daemon=True).start()

    def wait_for_weights(self, number: int) -> None:
        """Wait until the rollout of this number may start."""
        with self._changed:
            self._changed.wait_for(lambda: self.disconnected or self.version >= number - self.staleness)
        self.check()

    def check(self) -> None:
        if self.disconnected:
            raise _Disconnected

    def take_video_request(self) -> int:
        with self._changed:
            videos, self.videos = self.videos, 0
        return videos

    def _write(self, packed: bytes) -> None:
        try:
            self._pipe.write(packed)
        except OSError:
            self._disconnect()

    def _receive_changes(self) -> None:
        with suppress(_Disconnected):
            while True:
                changes: dict[str, int] = self.receive()
                with self._changed:
                    vars(self).update(changes)
                    self._changed.notify()

    def _disconnect(self) -> None:
        with self._changed:
            self.disconnected = True
            self._changed.notify()

    def _stop(self) -> None:
        """Close the env within a limited time, even if a stage hangs, so that nothing waits for this process."""
        self._disconnect()
        time.sleep(_STOP_S)
        closing = threading.Thread(target=self.close_env, daemon=True)
        closing.start()
        closing.join(_STOP_S)
        if self.ending:
            closing.join(CLOSE_S - _STOP_S)


class _Actor:
    """`factory()` creates the collector, its buffer, and the scorer of the parity gate."""

    def __init__(self, pipe: _ActorPipe, factory: Any, deadlines: SharedHandle):
        rollout, folder = factory.config.rollout, factory.config.buffer.folder
        # folder: the folder of rollouts; None: RAM
        self.pipe, self.slots, self.folder = pipe, rollout.staleness + 1, Path(folder) if folder else None
        # [groups, len(WATCHED)]
        table = SharedMemory.attach(deadlines).arrays["deadlines",]
        self.deadlines = StageDeadlines(table, WATCHED, rollout.watchdog_s)
        self.collector, self.buffer, self.scorer = factory()
        self.device = self.collector.env.device
        for group, collector in enumerate(self.collector.by_group):
            collector.stopwatch = self._watched_stopwatch(f"collector {group}", group)
        self.collector.stopwatch = self.stopwatch = self._watched_stopwatch("collector", 0)
        self.rollouts: SharedMemory | None = None
        self.states = TensorSlots(self.slots, self.folder)
        self._closing, self._closed = threading.Lock(), False
        self.deadlines.leave(0, "make")

    def _watched_stopwatch(self, who: str, group: int) -> Stopwatch:
        """A stopwatch that writes the deadline of each stage, and raises _Disconnected after a disconnection."""

        def enter(stage: str) -> None:
            self.pipe.check()
            self.deadlines.enter(group, stage)

        return Stopwatch(who, enter, partial(self.deadlines.leave, group))

    def close(self) -> None:
        """Close the env once; further calls, from any thread, wait for the first."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self.collector.env.close()

    def load_state_dict(self, state: dict) -> bool:
        """Continue from the state of a report."""
        with self.stopwatch.stage("load", self.collector.version):
            set_random_state(state["random"], self.device)
            return self.collector.load_state_dict(state)

    def reseed(self, more: int) -> None:
        self.collector.reseed(more)

    def act(self, begin: Begin) -> None:
        """Collect rollouts until the learner disconnects."""
        collector, stopwatch = self.collector, self.stopwatch
        weights, number = WeightsReader(begin.weights, collector.policy), begin.number
        while True:
            with stopwatch.stage("wait", collector.version):
                self.pipe.wait_for_weights(number)
            with stopwatch.stage("load", collector.version):
                collector.version = weights.load()
            if videos := self.pipe.take_video_request():
                collector.record_video(videos)
            collector.collect(self.buffer)
            rollout = self.buffer.rollout()
            with stopwatch.stage("gate", collector.version):
                # here, before newer weights replace the acting ones
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
        state = self.states.extract(collector.state_dict() | {"random": random_state(self.device)}, number)
        counts = (collector.version, len(self.buffer.rollout()), collector.env_steps, collector.env.spec)
        videos = [video.rendered() for video in collector.drain_videos()]
        played = (collector.drain_episodes(), videos, spans)
        rollouts = self.rollouts.handle if first else None
        states = self.states.shared.handle if first and self.states.shared else None
        return Report(number, *counts, state, busy | metrics, parity, *played, rollouts, states)


def _serve(pipe: _ActorPipe) -> None:
    """Create the env, answer calls, then collect until the learner disconnects; an error is sent as last message."""
    actor = None
    try:
        factory, deadlines = pipe.receive()
        exact_kernels()
        torch.set_num_threads(factory.config.threads or 1)
        seed_everything(factory.random_seed)
        _prioritise(factory.device)
        actor = _Actor(pipe, factory, deadlines)
        pipe.close_env = actor.close
        pipe.send(actor.collector.env.spec)
        while not isinstance(message := pipe.receive(), Begin):
            method, arguments = message
            pipe.send(getattr(actor, method)(*arguments))
        pipe.start_receiving(message)
        actor.act(message)
    except _Disconnected:
        return
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # third-party envs and policies may raise anything
        (what, trace), diverged = error_report(error), isinstance(error, Diverged)
        collectors = [*actor.collector.by_group, actor.collector] if actor else []
        stages = [collector.stopwatch.failed for collector in collectors]
        pipe.send(Failure(what, next(filter(None, stages), "wait") if actor else "make", trace, diverged))
        pipe.finish()
    finally:
        pipe.ending = True
        if actor:
            actor.close()


def _prioritise(device: torch.device) -> None:
    """Give acting priority over learning on the same GPU (under MPS), because it is short and robots wait for it."""
    if device.type == "cuda":
        # lower numbers have priority; the default is 0
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))


def _main() -> None:
    pipe = _ActorPipe()
    # the learner writes this process's messages to its env log
    logging.basicConfig(format="%(levelname)s %(message)s")
    logging.getLogger("sparring").setLevel(logging.DEBUG)
    _serve(pipe)
    # `_exit`, because threads may still be simulating
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
