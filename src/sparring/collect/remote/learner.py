"""The learner's side of rollout.mode=async: robots that another process owns, seen as an env and a collector."""

import time
from collections import deque
from pathlib import Path

import torch
from tensordict import TensorDict

from sparring.collect.camera import Episode, Film
from sparring.collect.collector import BaseCollector
from sparring.collect.remote.actor_process import ActorProcess
from sparring.collect.remote.protocol import Begin, FilmNext, NewVersion, Report
from sparring.collect.remote.weights import SnapshotWriter
from sparring.collect.timing import Span, Stopwatch
from sparring.policies.policy import Policy
from sparring.processes.shared_memory import SharedTensors, received

# good rollouts after which robots may be further behind again, at most
MOST_NEEDED = 32


class RemoteEnv:
    """What there is to know of robots that are elsewhere."""

    def __init__(self, acting, config):
        rollout = config.rollout
        self.actor = ActorProcess(acting, config)
        self.num_envs, self.config, self.device = rollout.n_envs, config.env, acting.seat.device
        self.spec = self.actor.made().spec

    def close(self) -> None:
        self.actor.close()


class ReceivedRollout:
    """The rollout that is learned from: on the CPU where it lies, for a GPU as a copy. Gone when weights change."""

    def __init__(self, device: torch.device):
        self.device = device
        self._rollout: TensorDict | None = None

    def show(self, places: SharedTensors, place: int, decisions: int) -> None:
        views = {key: column[place, :decisions] for key, column in places.tensors.items()}
        robots = next(iter(views.values())).shape[1]
        rollout = TensorDict({}, [decisions, robots])
        for key, view in views.items():
            # a GPU has read it before it has computed the weights whose publication lets others write there
            rollout.set(key, view if self.device.type == "cpu" else view.to(self.device, non_blocking=True))
        self._rollout = rollout

    def rollout(self) -> TensorDict:
        """`[T, N]`."""
        return self._rollout.copy()

    def bytes(self) -> int:
        return 0 if self._rollout is None else self._rollout.bytes()


class RemoteCollector(BaseCollector):
    """A collector whose rollouts are made elsewhere, meanwhile. It begins with the first one that is asked for.

    Its state is that after the last rollout that was learned from: what was collected since is collected again when a
    run goes on, by newer weights. So a checkpoint needs nothing of the collecting process, not even that it lives.
    """

    def __init__(self, env: RemoteEnv, policy: Policy, staleness: int, least_ess: float = 0.0, folder=None):
        self.env, self.actor, self.policy, self.staleness = env, env.actor, policy, staleness
        # where weights lie; None: in shared memory
        self.folder: Path | None = folder
        # of what is collected from now on, at most `staleness`
        self.least_ess, self.allowed = least_ess, staleness
        # since which version; how many good rollouts in a row there were, and how many it takes to be allowed more
        self._paced_at, self._good, self._good_needed = 0, 0, 1
        self.version = self.env_steps = 0
        self._rollout_version = 0
        self.stopwatch = Stopwatch("learner")
        # after the last rollout that was learned from; and after the one that is being learned from
        self._state: dict | None = None
        self._taken: dict | None = None
        self._weights: SnapshotWriter | None = None
        self._places: SharedTensors | None = None
        self._parcels: SharedTensors | None = None
        self._finished: deque[Report] = deque()
        self._episodes: list[Episode] = []
        self._films: list[Film] = []
        # asked for before it began
        self._to_film = 0
        # of the newest rollout
        self._figures: dict[str, float] = {}
        self._spans: list[Span] = []
        self._taken_at: float | None = None

    def collect(self, buffer: ReceivedRollout) -> None:
        """Take the next rollout, when it is there."""
        if self._weights is None:
            self._begin()
        with self.stopwatch.stage("wait", self.version):
            report = self._next_report()
        if report.places is not None:
            self._places = SharedTensors.attach(report.places)
            self._places.pin(self.env.device)
            self._weights.arrived()
        if report.parcels is not None:
            self._parcels = SharedTensors.attach(report.parcels)
        with self.stopwatch.stage("take", self.version):
            buffer.show(self._places, report.number % (self.staleness + 1), report.decisions)
            self._taken = received(report.state, self._parcels, report.number)
        self.env.spec, self.env_steps = report.spec, report.env_steps
        self.parity, self._rollout_version = report.parity, report.version
        self._episodes += report.episodes
        self._films += report.films
        self._tell(report)

    def weights_changed(self) -> None:
        """Publish them: the rollout that was taken last is done with."""
        self.version += 1
        self._state = self._taken
        with self.stopwatch.stage("publish", self.version):
            self._weights.write(self.version)
        self.actor.say(NewVersion(self.version, self.allowed))

    def pace(self, ess: float) -> None:
        """By what the newest rollout was worth: little, and the robots wait for newer weights from now on.

        So nothing that was collected is thrown away. What began before the last change says nothing about it. After
        each fall it takes twice as many good rollouts until robots may hurry again.
        """
        if self._rollout_version < self._paced_at:
            return
        if ess < self.least_ess and self.allowed > 0:
            self._allow(self.allowed - 1)
            self._good_needed = min(2 * self._good_needed, MOST_NEEDED)
        elif ess > (1 + self.least_ess) / 2 and self.allowed < self.staleness:
            self._good += 1
            if self._good >= self._good_needed:
                self._allow(self.allowed + 1)
        else:
            self._good = 0

    def _allow(self, staleness: int) -> None:
        # told with the next version: rollouts that begin then have it
        self.allowed, self._paced_at, self._good = staleness, self.version + 1, 0

    def _begin(self) -> None:
        self._weights = SnapshotWriter(self.policy, self.version, self.folder)
        self.actor.say(Begin(self.version, self._weights.handle(), self._to_film, self.allowed))

    def _next_report(self) -> Report:
        """What there is is heard first, so that a failure is known although rollouts are waiting."""
        self._finished += self.actor.heard(wait=not self._finished)
        while not self._finished:
            self._finished += self.actor.heard(wait=True)
        return self._finished.popleft()

    def _tell(self, report: Report) -> None:
        (waited, spans), now = self.stopwatch.drain(), time.time()
        behind = self.version - report.version
        figures = report.figures | {"queue_depth": float(len(self._finished)), "staleness": float(behind)}
        figures["staleness_allowed"] = float(self.allowed)
        # over several updates their means are shares
        figures |= {f"behind_{versions}": float(versions == behind) for versions in range(self.staleness + 1)}
        figures["actor_wait_seconds"] = idle = figures.pop("wait_seconds", 0.0)
        figures["actor_idle"] = idle / (idle + figures["collect_seconds"] + figures["handover_seconds"])
        figures["learner_wait_seconds"] = waited["wait"]
        if self._taken_at is not None:
            figures["learner_idle"] = waited["wait"] / (now - self._taken_at)
        self._figures, self._taken_at = figures, now
        self._spans = [*spans, *report.spans]

    def drain_stages(self) -> tuple[dict[str, float], list[Span]]:
        told, self._figures, self._spans = (self._figures, self._spans), {}, []
        return told

    def drain_episodes(self) -> list[Episode]:
        episodes, self._episodes = self._episodes, []
        return episodes

    def film(self, robots: int) -> None:
        """Of the first so many robots, the next episode that begins after the rollout that is being collected."""
        self._to_film = robots
        if self._weights is not None:
            self.actor.say(FilmNext(robots))

    def drain_films(self) -> list[Film]:
        films, self._films = self._films, []
        return films

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
        # a checkpoint of a synchronous run says nothing of pace
        self.allowed = min(self.staleness, state.get("allowed", self.staleness))
        self._good, self._good_needed = state.get("good", 0), state.get("good_needed", 1)
        self._paced_at = self.version
        return self.actor.call("load_state_dict", state)
