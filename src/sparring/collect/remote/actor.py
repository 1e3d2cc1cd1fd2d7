"""The collecting process of rollout.mode=async: it owns the robots and a copy of the policy, and fills rollouts.

Run as `python -m sparring.collect.remote.actor <fd>`, where fd is its end of a pipe to the learner. Rollout k begins
when the weights are of version k - staleness or newer, with the newest there are; the learner may ask for less
staleness than was agreed on at first. k's place is k modulo (that + 1), which the learner is then done with. It ends
when the pipe is closed, as it also is when the learner dies.
"""

import logging
import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

import numpy as np
import torch

from sparring.algorithms.parity import Parity
from sparring.collect.remote.protocol import FIRST_TIME, WATCHED, ActorPipe, Begin, Failure, HungUp, Made, Report, Start
from sparring.collect.remote.weights import SnapshotReader, go_first
from sparring.collect.timing import Stopwatch
from sparring.data.buffer import leaves
from sparring.errors import UserError
from sparring.noise import random_state, seed_everything, set_random_state
from sparring.processes.distributed import exact_kernels
from sparring.processes.shared_memory import Parcels, SharedTensors, finish_copies
from sparring.processes.signals import leave_signals_to_the_parent
from sparring.processes.storage import Column


class WatchedStopwatch(Stopwatch):
    """Tells by when each stage has to be over, and ends where the learner has gone."""

    def __init__(self, who: str, deadlines: np.ndarray, watchdog_s: float, line: ActorPipe):
        super().__init__(who)
        self.deadlines, self.watchdog_s, self.line = deadlines, watchdog_s, line
        self.known: set[str] = set()

    def entered(self, stage: str) -> None:
        self.line.check()
        if stage in WATCHED:
            patience = self.watchdog_s * (1 if stage in self.known else FIRST_TIME)
            self.deadlines[WATCHED.index(stage)] = time.monotonic() + patience

    def left(self, stage: str) -> None:
        if stage in WATCHED:
            self.deadlines[WATCHED.index(stage)] = 0
            self.known.add(stage)


class Actor:
    def __init__(self, line: ActorPipe, start: Start):
        self.line, self.start = line, start
        self.deadlines = SharedTensors.attach(start.deadlines).tensors["deadlines",].numpy()
        self.collector, self.buffer, self.scorer = start.acting()
        self.device = self.collector.env.device
        # groups have stages of their own
        self.stopwatch = self._watched("collector", 0)
        for lane, part in enumerate(getattr(self.collector, "collectors", ())):
            part.stopwatch = self._watched(f"collector {lane}", lane)
        self.collector.stopwatch = self.stopwatch
        self.places: SharedTensors | None = None
        self.parcels = Parcels(start.staleness + 1, start.folder)
        self.reported = False
        self._closing, self._closed = threading.Lock(), False
        self.deadlines[0, WATCHED.index("make")] = 0

    def _watched(self, who: str, lane: int) -> WatchedStopwatch:
        return WatchedStopwatch(who, self.deadlines[lane], self.start.watchdog_s, self.line)

    def failed_at(self) -> str:
        parts = getattr(self.collector, "collectors", [self.collector])
        return (
            next((part.stopwatch.failed for part in parts if part.stopwatch.failed), None)
            or self.stopwatch.failed
            or "wait"
        )

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
        policy = self.collector.policy
        snapshot, number = SnapshotReader(begin.weights, policy), begin.number
        while True:
            with self.stopwatch.stage("wait", self.collector.version):
                self.line.wait_for_turn(number)
            with self.stopwatch.stage("load", self.collector.version):
                self.collector.version = snapshot.load()
            if films := self.line.take_films():
                self.collector.film(films)
            self.collector.collect(self.buffer)
            parity = self._hand_over(number)
            with self.stopwatch.stage("report", self.collector.version):
                self.line.say(self._report(number, parity))
            number += 1

    def _hand_over(self, number: int) -> Parity | None:
        """The rollout into its place, scored again before its weights are gone."""
        collector, rollout = self.collector, self.buffer.rollout()
        with self.stopwatch.stage("gate", collector.version):
            parity = self.scorer.replay(rollout, collector.version) if self.scorer else None
        with self.stopwatch.stage("share", collector.version):
            if self.places is None:
                self.places = self._make_places(rollout)
                self.places.pin(self.device)
            place = number % (self.start.staleness + 1)
            for key, value in leaves(rollout):
                self.places.tensors[key][place, : len(rollout)].copy_(value, non_blocking=True)
            finish_copies(self.device)
        return parity

    def _report(self, number: int, parity: Parity | None) -> Report:
        collector, seconds = self.collector, self.stopwatch.seconds
        told = {f"{stage}_seconds": seconds[stage] for stage in ("collect", "wait")}
        told["handover_seconds"] = sum(seconds[stage] for stage in ("load", "gate", "share", "report"))
        figures, spans = collector.drain_stages()
        state = self.parcels.send(collector.state_dict() | {"random": random_state(self.device)}, number)
        first, self.reported = not self.reported, True
        return Report(
            number,
            collector.version,
            len(self.buffer.rollout()),
            collector.env_steps,
            collector.env.spec,
            state,
            figures | told,
            parity,
            collector.drain_episodes(),
            [film.developed() for film in collector.drain_films()],
            spans,
            self.places.handle() if first else None,
            self.parcels.shared.handle() if first and self.parcels.shared else None,
        )

    def _make_places(self, rollout) -> SharedTensors:
        # [places, T, N, ...]
        shape = (self.start.staleness + 1, self.buffer.steps)
        columns = {key: Column((*shape, *value.shape[1:]), value.dtype) for key, value in leaves(rollout)}
        return SharedTensors.make(columns, self.start.folder)


def serve(line: ActorPipe) -> None:
    """Make the robots, do what is asked once, then collect until hung up on; the last word is what went wrong."""
    actor = None
    try:
        start = line.hear()
        exact_kernels()
        torch.set_num_threads(start.threads)
        seed_everything(start.acting.random_seed)
        go_first(start.acting.seat.device)
        actor = Actor(line, start)
        line.at_hang_up = actor.close
        line.say(Made(actor.collector.env.spec))
        while not isinstance(message := line.hear(), Begin):
            method, arguments = message
            line.say(getattr(actor, method)(*arguments))
        line.version, line.staleness, line.films = message.number, message.staleness, message.films
        line.listen()
        actor.act(message)
    except HungUp:
        return
    except Exception as error:  # the robots and the policy are somebody else's code: whatever it raises is told
        told = " ".join([*_in_words(error), *getattr(error, "__notes__", ())])
        stage = actor.failed_at() if actor else "make"
        line.say(Failure(told, stage, None if isinstance(error, UserError) else traceback.format_exc()))
        line.finish()
    finally:
        line.ending = True
        if actor:
            actor.close()


def _in_words(error: Exception) -> list[str]:
    return [str(error)] if isinstance(error, UserError) else [f"{type(error).__name__}: {error}"]


def main() -> None:
    leave_signals_to_the_parent()
    # the learner keeps what is said here in its log of envs
    logging.basicConfig(format="%(levelname)s %(message)s")
    logging.getLogger("sparring").setLevel(logging.DEBUG)
    serve(ActorPipe(Connection(int(sys.argv[1]))))
    # threads that simulate may still be at it
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
