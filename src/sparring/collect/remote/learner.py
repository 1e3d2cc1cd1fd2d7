"""The learner's side of rollout.mode=async: an env and a collector for robots of the actor process."""

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

# maximum number of good rollouts before the allowed staleness is raised again
_MOST_NEEDED = 32
# timeout for a hanging actor process to end by itself, which takes 1 s (see `_ActorPipe._stop`)
_CLOSE_HUNG_S = 2.0
# variables of the learner's rank; the actor process belongs to no process group
_NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ActorProcess:
    """The actor process. If it ends without `close`, `receive` raises StageFailed with the reason."""

    def __init__(self, factory: Any, config: "Config"):
        rollout = config.rollout
        # kept until the actor process has attached it
        self._table = SharedMemory.make({("deadlines",): Column((rollout.groups, len(WATCHED)), np.dtype("float64"))})
        self.deadlines = StageDeadlines(self._table.arrays["deadlines",], WATCHED, rollout.watchdog_s)
        self.deadlines.enter(0, "make", MAKING_S)
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        # one heap for all threads, as in the learner (cli/train.py): video threads make memory grow otherwise
        environment.setdefault("MALLOC_ARENA_MAX", "1")
        self.child = Child("sparring.collect.remote.actor", "actor process", environment)
        # also runs when this object is collected as garbage, and when the interpreter ends
        self._finalizer = weakref.finalize(self, self.child.end, CLOSE_S)
        self._has_reported = False
        self.send((factory, self._table.handle))

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor before it collects; returns the result."""
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
        trace = f"\n\nTraceback of the actor process:\n{message.traceback}" if message.traceback else ""
        failed = self._failed(f"{DOING[message.stage]}: {message.message}{trace}")
        raise failed if trace or message.stage != "make" else UserError(message.message)

    def reports(self, wait: bool) -> list[Report]:
        """Returns the reports received so far; with `wait`, at least one."""
        reports = [self.receive()] if wait else []
        while self.child.has_message():
            reports.append(self.receive())
        self._check_alive()
        return reports

    def close(self, timeout_s: float = CLOSE_S) -> None:
        if self._finalizer.detach():
            self.child.end(timeout_s)

    def _check(self) -> None:
        """Raise if the actor process has ended or hangs; called while the learner waits for it."""
        self._check_alive()
        if OwnStages.now is not None:
            OwnStages.now.check()
        late, idle_s = self.deadlines.check()
        watchdog_s = self.deadlines.watchdog_s
        if late:
            group, stage = late
            raise self._failed(overdue(stage, group, watchdog_s), _CLOSE_HUNG_S)
        # idle means hanging: the time between two stages is short, and it cannot wait for weights while we wait for it
        timeout_s = watchdog_s * (1 if self._has_reported else FIRST_TIME)
        if idle_s > timeout_s:
            state = "is stopped by a signal (SIGSTOP)" if self.child.is_stopped() else "is idle"
            limit = f"{timeout_s:g} seconds (rollout.watchdog_s; the first time {FIRST_TIME} times as long)"
            raise self._failed(f"it {state} for {limit}", _CLOSE_HUNG_S)

    def _check_alive(self) -> None:
        if self.child.process.poll() is not None and not self.child.has_message():
            raise self._failed(f"it {self.child.death(CLOSE_S)}")

    def _failed(self, what: str, timeout_s: float = CLOSE_S) -> StageFailed:
        self.close(timeout_s)
        return StageFailed(f"the actor process failed: {what}")


class RemoteEnv:
    """The attributes of the env in the actor process."""

    def __init__(self, factory: Any, config: "Config"):
        self.actor = ActorProcess(factory, config)
        self.num_envs, self.config, self.device = config.rollout.n_envs, config.env, factory.device
        # sent when the env has been created
        self.spec: EnvSpec = self.actor.receive()

    def close(self) -> None:
        self.actor.close()


class ReceivedRollout:
    """The rollout for the next update: a view of shared memory on the CPU, a copy on a GPU. Valid until the weights
    change."""

    def __init__(self, device: torch.device):
        self.device = device
        self._rollout: TensorDict | None = None

    def show(self, rollouts: SharedMemory, slot: int, decisions: int) -> None:
        # [slots, T, N, ...] -> [decisions, N, ...]
        views = {key: tensor[slot, :decisions] for key, tensor in rollouts.tensors.items()}
        self._rollout = TensorDict({}, next(iter(views.values())).shape[:2])
        for key, view in views.items():
            # safe without waiting: the GPU copies it before it computes the next weights, and the actor process does
            # not overwrite it before these are published
            self._rollout.set(key, view if self.device.type == "cpu" else view.to(self.device, non_blocking=True))

    def rollout(self) -> TensorDict:
        return self._rollout.copy()

    def bytes(self) -> int:
        return 0 if self._rollout is None else self._rollout.bytes()


class RemoteCollector(BaseCollector):
    """A collector whose rollouts come from the actor process, which starts at the first call of `collect`.

    Its state is that after the last rollout used for learning. Later rollouts are collected again after a resume, with
    newer weights. A checkpoint can therefore be saved even if the actor process has died.
    """

    def __init__(
        self, env: RemoteEnv, policy: Policy, staleness: int, least_ess: float = 0.0, folder: Path | None = None
    ):
        self.env, self.actor, self.policy, self.staleness = env, env.actor, policy, staleness
        # folder: the folder of the weights; None: RAM. allowed: the staleness of rollouts that start from now on
        self.folder, self.least_ess, self.allowed = folder, least_ess, staleness
        # version at the last change of `allowed`; good rollouts in a row since then, and the number needed to raise it
        self._paced_at, self._good, self._good_needed = 0, 0, 1
        self.version = self.env_steps = self._rollout_version = 0
        self.stopwatch = Stopwatch("learner")
        # the actor's state after the last rollout used for learning, and after the one in use
        self._state: dict | None = None
        self._next_state: dict | None = None
        self._weights: WeightsWriter | None = None
        self._rollouts: SharedMemory | None = None
        self._states: SharedMemory | None = None
        self._finished: deque[Report] = deque()
        self._episodes: list[Episode] = []
        self._videos: list[EpisodeVideo] = []
        # robots to record, requested before the start
        self._to_record = 0
        # metrics and spans of the newest rollout
        self._metrics: dict[str, float] = {}
        self._spans: list[Span] = []
        self._taken_at: float | None = None

    def collect(self, buffer: ReceivedRollout) -> None:
        """Wait for the next rollout and take it."""
        if self._weights is None:
            self._weights = WeightsWriter(self.policy, self.version, self.folder)
            self.actor.send(Begin(self.version, self._weights.handle(), self._to_record, self.allowed))
        # no deadline here, because the stages of the actor process have theirs; but a stop of the run ends the wait
        with self.stopwatch.stage("wait", self.version), OwnStage("rollout", timeout_s=math.inf):
            # read all messages first, so that a failure is raised even if rollouts are waiting
            self._finished += self.actor.reports(wait=not self._finished)
            report = self._finished.popleft()
        if report.rollouts is not None:
            self._rollouts = SharedMemory.attach(report.rollouts)
            self._rollouts.pin(self.env.device)
            # by now the initial weights are loaded
            self._weights.initial = None
        if report.states is not None:
            self._states = SharedMemory.attach(report.states)
        assert self._rollouts is not None
        with self.stopwatch.stage("take", self.version):
            buffer.show(self._rollouts, report.number % (self.staleness + 1), report.decisions)
            self._next_state = TensorSlots.restore(report.state, self._states, report.number)
        self.env.spec, self.env_steps = report.spec, report.env_steps
        self.parity, self._rollout_version = report.parity, report.version
        self._episodes += report.episodes
        self._videos += report.videos
        self._measure(report)

    def weights_changed(self) -> None:
        """Publish the weights; the actor process may then overwrite the rollout that was taken last."""
        self.version += 1
        self._state = self._next_state
        with self.stopwatch.stage("publish", self.version):
            self._weights.write(self.version)
        self.actor.send({"version": self.version, "staleness": self.allowed})

    def pace(self, ess: float) -> None:
        """Lower the allowed staleness if `ess` of the newest rollout is too small; raise it after good rollouts.

        No rollout is discarded. Rollouts from before the last change are ignored. Each reduction doubles the number of
        good rollouts needed to raise the staleness again.
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
        # sent with the next version, so it applies to rollouts from then on
        self.allowed, self._paced_at, self._good = staleness, self.version + 1, 0

    def _measure(self, report: Report) -> None:
        (waited, spans), now = self.stopwatch.drain(), time.time()
        behind = self.version - report.version
        metrics = report.metrics | {"queue_depth": float(len(self._finished)), "staleness": float(behind)}
        metrics["staleness_allowed"] = float(self.allowed)
        # 0 or 1, so that their averages over updates are shares of rollouts
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
        """Record episodes that start after the rollout in progress."""
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
