"""The learner's side of rollout.mode=async: robots that another process owns, seen as an env and a collector."""

import math
import os
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from sparring.collect.camera import Episode, EpisodeVideo
from sparring.collect.collector import BaseCollector, Span, Stopwatch
from sparring.collect.remote.protocol import CLOSE_S, WATCHED, Begin, Failure, Report, TensorSlots, WeightsWriter
from sparring.contract import EnvSpec
from sparring.errors import Diverged, StageFailed, UserError
from sparring.policies.policy import Policy
from sparring.processes.child import Child
from sparring.processes.heartbeat import DOING, FIRST_TIME, MAKING_S, OwnStage, OwnStages, StageDeadlines, overdue
from sparring.processes.memory import Column, SharedMemory

if TYPE_CHECKING:
    from sparring.config.schema import Config

# good rollouts after which robots may be further behind again, at most
_MOST_NEEDED = 32
# what it gets to leave by itself when it hangs, which takes it 1 s
_CLOSE_HUNG_S = 2.0
# of the learner's rank; the collecting process belongs to no group of processes
_NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ActorProcess:
    """The collecting process. Whatever ends it other than `close` is raised, as a StageFailed, by `receive`."""

    def __init__(self, factory: Any, config: "Config"):
        rollout = config.rollout
        # kept until the other has attached it
        self._table = SharedMemory.make({("deadlines",): Column((rollout.groups, len(WATCHED)), np.dtype("float64"))})
        self.deadlines = StageDeadlines(self._table.arrays["deadlines",], WATCHED, rollout.watchdog_s)
        self.deadlines.enter(0, "make", MAKING_S)
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        self.child = Child("sparring.collect.remote.actor", "collecting process", environment)
        # also runs when this is garbage, and when the interpreter ends
        self._finalizer = weakref.finalize(self, self.child.end, CLOSE_S)
        self._has_reported = False
        self.send((factory, self._table.handle))

    def call(self, method: str, *arguments: Any) -> Any:
        """The answer of a method of the actor's, before it collects."""
        self.send((method, arguments))
        return self.receive()

    def send(self, message: Any) -> None:
        self.child.send(message, self._check)

    def receive(self) -> Any:
        try:
            message = self.child.receive(self._check)
        except EOFError:
            raise self._failed(f"it {self.child.death(CLOSE_S)}") from None
        self.deadlines.idle_since = None
        self._has_reported = self._has_reported or isinstance(message, Report)
        if not isinstance(message, Failure):
            return message
        if message.diverged:
            self.close()
            raise Diverged(message.message)
        trace = f"\n\nTraceback of the collecting process:\n{message.traceback}" if message.traceback else ""
        failed = self._failed(f"{DOING[message.stage]}: {message.message}{trace}")
        raise failed if trace or message.stage != "make" else UserError(message.message)

    def reports(self, wait: bool) -> list[Report]:
        """Those that have come; with `wait`, one at least."""
        reports = [self.receive()] if wait else []
        while self.child.has_message():
            reports.append(self.receive())
        self._check_alive()
        return reports

    def close(self, patience_s: float = CLOSE_S) -> None:
        if self._finalizer.detach():
            self.child.end(patience_s)

    def _check(self) -> None:
        """While the learner waits for it."""
        self._check_alive()
        if OwnStages.now is not None:
            OwnStages.now.check()
        late, idle_s = self.deadlines.look()
        watchdog_s = self.deadlines.watchdog_s
        if late:
            group, stage = late
            raise self._failed(overdue(stage, group, watchdog_s), _CLOSE_HUNG_S)
        # between two stages hardly any time goes by, and it is not the weights that it waits for: we wait for it
        patience = watchdog_s * (1 if self._has_reported else FIRST_TIME)
        if idle_s > patience:
            doing = "is stopped, by a signal (SIGSTOP)" if self.child.is_stopped() else "does nothing"
            given = f"{patience:g} seconds (rollout.watchdog_s; the first time {FIRST_TIME} times as long)"
            raise self._failed(f"it {doing}, for {given}", _CLOSE_HUNG_S)

    def _check_alive(self) -> None:
        if self.child.process.poll() is not None and not self.child.has_message():
            raise self._failed(f"it {self.child.death(CLOSE_S)}")

    def _failed(self, what: str, patience_s: float = CLOSE_S) -> StageFailed:
        self.close(patience_s)
        return StageFailed(f"the collecting process failed: {what}")


class RemoteEnv:
    """What there is to know of robots that another process owns."""

    def __init__(self, factory: Any, config: "Config"):
        self.actor = ActorProcess(factory, config)
        self.num_envs, self.config, self.device = config.rollout.n_envs, config.env, factory.device
        # when the robots are made
        self.spec: EnvSpec = self.actor.receive()

    def close(self) -> None:
        self.actor.close()


class ReceivedRollout:
    """The rollout that is learned from: on the CPU where it lies, for a GPU as a copy. Gone when weights change."""

    def __init__(self, device: torch.device):
        self.device = device
        self._rollout: TensorDict | None = None

    def show(self, rollouts: SharedMemory, slot: int, decisions: int) -> None:
        # [slots, T, N, ...] -> [decisions, N, ...]
        views = {key: tensor[slot, :decisions] for key, tensor in rollouts.tensors.items()}
        self._rollout = TensorDict({}, next(iter(views.values())).shape[:2])
        for key, view in views.items():
            # a GPU has read it before it has computed the weights whose publication lets others write there
            self._rollout.set(key, view if self.device.type == "cpu" else view.to(self.device, non_blocking=True))

    def rollout(self) -> TensorDict:
        return self._rollout.copy()

    def bytes(self) -> int:
        return 0 if self._rollout is None else self._rollout.bytes()


class RemoteCollector(BaseCollector):
    """A collector whose rollouts are made elsewhere, meanwhile. It begins with the first one that is asked for.

    Its state is that after the last rollout that was learned from: what was collected since is collected again when a
    run goes on, by newer weights. So a checkpoint needs nothing of the collecting process, not even that it lives.
    """

    def __init__(
        self, env: RemoteEnv, policy: Policy, staleness: int, least_ess: float = 0.0, folder: Path | None = None
    ):
        self.env, self.actor, self.policy, self.staleness = env, env.actor, policy, staleness
        # folder: where weights lie; None: in RAM. allowed: the staleness of rollouts that begin from now on
        self.folder, self.least_ess, self.allowed = folder, least_ess, staleness
        # version of the last change; good rollouts in a row since, and how many it takes to be allowed more
        self._paced_at, self._good, self._good_needed = 0, 0, 1
        self.version = self.env_steps = self._rollout_version = 0
        self.stopwatch = Stopwatch("learner")
        # after the last rollout that was learned from; and after the one that is being learned from
        self._state: dict | None = None
        self._next_state: dict | None = None
        self._weights: WeightsWriter | None = None
        self._rollouts: SharedMemory | None = None
        self._states: SharedMemory | None = None
        self._finished: deque[Report] = deque()
        self._episodes: list[Episode] = []
        self._videos: list[EpisodeVideo] = []
        # asked for before it began
        self._to_record = 0
        # of the newest rollout
        self._metrics: dict[str, float] = {}
        self._spans: list[Span] = []
        self._taken_at: float | None = None

    def collect(self, buffer: ReceivedRollout) -> None:
        """Take the next rollout, when it is there."""
        if self._weights is None:
            self._weights = WeightsWriter(self.policy, self.version, self.folder)
            self.actor.send(Begin(self.version, self._weights.handle(), self._to_record, self.allowed))
        # its deadlines are the collecting process's; but it is broken off when the run is to stop
        with self.stopwatch.stage("wait", self.version), OwnStage("rollout", patience_s=math.inf):
            # what has come is read first, so that a failure is known although rollouts are waiting
            self._finished += self.actor.reports(wait=not self._finished)
            report = self._finished.popleft()
        if report.rollouts is not None:
            self._rollouts = SharedMemory.attach(report.rollouts)
            self._rollouts.pin(self.env.device)
            # by now the weights to begin with have arrived
            self._weights.whole = None
        if report.states is not None:
            self._states = SharedMemory.attach(report.states)
        assert self._rollouts is not None
        with self.stopwatch.stage("take", self.version):
            buffer.show(self._rollouts, report.number % (self.staleness + 1), report.decisions)
            self._next_state = TensorSlots.put_back(report.state, self._states, report.number)
        self.env.spec, self.env_steps = report.spec, report.env_steps
        self.parity, self._rollout_version = report.parity, report.version
        self._episodes += report.episodes
        self._videos += report.videos
        self._measure(report)

    def weights_changed(self) -> None:
        """Publish them: the rollout that was taken last is done with."""
        self.version += 1
        self._state = self._next_state
        with self.stopwatch.stage("publish", self.version):
            self._weights.write(self.version)
        self.actor.send({"version": self.version, "staleness": self.allowed})

    def pace(self, ess: float) -> None:
        """Where the newest rollout was worth little, robots wait for newer weights from now on.

        So nothing that was collected is thrown away. What began before the last change says nothing about it. After
        each fall it takes twice as many good rollouts until robots may hurry again.
        """
        if self._rollout_version < self._paced_at:
            return
        if ess < self.least_ess and self.allowed > 0:
            self._allow(self.allowed - 1)
            self._good_needed = min(2 * self._good_needed, _MOST_NEEDED)
        elif ess > (1 + self.least_ess) / 2 and self.allowed < self.staleness:
            self._good += 1
            if self._good >= self._good_needed:
                self._allow(self.allowed + 1)
        else:
            self._good = 0

    def _allow(self, staleness: int) -> None:
        # sent with the next version: rollouts that begin then have it
        self.allowed, self._paced_at, self._good = staleness, self.version + 1, 0

    def _measure(self, report: Report) -> None:
        (waited, spans), now = self.stopwatch.drain(), time.time()
        behind = self.version - report.version
        metrics = report.metrics | {"queue_depth": float(len(self._finished)), "staleness": float(behind)}
        metrics["staleness_allowed"] = float(self.allowed)
        # over several updates their means are shares
        metrics |= {f"behind_{versions}": float(versions == behind) for versions in range(self.staleness + 1)}
        metrics["actor_wait_seconds"] = idle = metrics.pop("wait_seconds", 0.0)
        metrics["actor_idle"] = idle / (idle + metrics["collect_seconds"] + metrics["handover_seconds"])
        metrics["learner_wait_seconds"] = waited["wait"]
        if self._taken_at is not None:
            metrics["learner_idle"] = waited["wait"] / (now - self._taken_at)
        self._metrics, self._taken_at, self._spans = metrics, now, [*spans, *report.spans]

    def drain_stages(self) -> tuple[dict[str, float], list[Span]]:
        drained, self._metrics, self._spans = (self._metrics, self._spans), {}, []
        return drained

    def drain_episodes(self) -> list[Episode]:
        episodes, self._episodes = self._episodes, []
        return episodes

    def record_video(self, robots: int) -> None:
        """The episodes that begin after the rollout that is being collected."""
        self._to_record = robots
        if self._weights is not None:
            self.actor.send({"videos": robots})

    def drain_videos(self) -> list[EpisodeVideo]:
        videos, self._videos = self._videos, []
        return videos

    def reseed(self, more: int) -> None:
        self.actor.call("reseed", more)

    def state_dict(self) -> dict | None:
        if self._state is None:
            return None
        pace = {"allowed": self.allowed, "good": self._good, "good_needed": self._good_needed}
        return self._state | {"version": self.version} | pace

    def load_state_dict(self, state: dict | None) -> bool:
        if state is None:
            return True
        self._state, self.version, self.env_steps = state, state["version"], state["env_steps"]
        self.allowed, self._good, self._good_needed = state["allowed"], state["good"], state["good_needed"]
        self._paced_at = self.version
        return self.actor.call("load_state_dict", state)
