"""Collector: the only place where a policy acts in an env; and the stopwatch of its stages."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict

from sparring.algorithms.scoring import Parity
from sparring.collect.camera import Camera, Episode, EpisodeTracker, EpisodeVideo
from sparring.contract import (
    POLICY_MEMORY,
    check_completed,
    check_decision,
    check_memory,
    check_observation,
    check_step,
)
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.errors import Diverged, UserError
from sparring.noise import keyed_uniform
from sparring.policies.policy import Policy
from sparring.processes.memory import explain_oom

# maximum number of spans kept until they are read: a few rollouts
_KEPT = 8192


@dataclass(frozen=True)
class Span:
    """One run of a stage, in seconds since the epoch. `who`: learner, collector, or collector 0, 1, ... of groups."""

    who: str
    stage: str
    begin: float
    end: float
    version: int  # version of the weights that acted, or with which an update started


class Stopwatch:
    """Times stages of one thread. `entered` and `left` are called with the name of each stage."""

    def __init__(
        self, who: str, entered: Callable[[str], None] | None = None, left: Callable[[str], None] | None = None
    ):
        self.who, self._entered, self._left = who, entered, left
        self.seconds: dict[str, float] = defaultdict(float)
        self.spans: deque[Span] = deque(maxlen=_KEPT)
        self.failed: str | None = None  # the stage in which an exception was raised

    @contextmanager
    def stage(self, stage: str, version: int) -> Iterator[None]:
        began = time.time()
        if self._entered:
            self._entered(stage)
        try:
            yield
        except BaseException:
            self.failed = self.failed or stage
            raise
        if self._left:
            self._left(stage)
        ended = time.time()
        self.seconds[stage] += ended - began
        self.spans.append(Span(self.who, stage, began, ended, version))

    def drain(self) -> tuple[dict[str, float], list[Span]]:
        """Returns the seconds and spans of the stages since the last call."""
        drained = dict(self.seconds), list(self.spans)
        self.seconds.clear()
        self.spans.clear()
        return drained


# offset of the noise clock in evaluations, so that their noise differs from training noise
_EVAL_NOISE = 1 << 40


@torch.no_grad()
def complete_rollout(
    policy: Policy, buffer: RolloutBuffer, root: TensorDict, version: int, check: bool
) -> torch.Tensor:
    """Write log-probs, values, `next/value` and `version` to the buffer, computed with the weights that acted.

    `root`: the root with which the next rollout starts. Returns the values `[T, N]`.
    """
    buffer.close(root)
    rollout = buffer.rollout()
    # [T, N] -> [T*N] -> [T, N]
    completed = policy.complete(rollout.flatten(0, 1)).unflatten(0, rollout.batch_size)
    for key, column in completed.items(True, True):
        buffer.set(key, column)
    rollout = buffer.rollout()
    if check:
        check_completed(rollout, policy.step_weights, "policy.complete")
    buffer.set("version", torch.full_like(rollout["next", "executed"], version))
    buffer.set(("next", "value"), _next_values(policy, buffer, rollout, root))
    return rollout["value"]


def _next_values(policy: Policy, buffer: RolloutBuffer, rollout: TensorDict, root: TensorDict) -> torch.Tensor:
    """V of the true next observation: that of the following row, unless the episode or the rollout ended."""
    following = torch.empty_like(rollout["value"])
    following[:-1] = rollout["value"][1:]
    last, remembers = buffer.last, policy.memory_size
    following[-1] = policy.value(last.set(POLICY_MEMORY, root[POLICY_MEMORY]) if remembers else last)
    ends = buffer.finals()
    if ends is not None:
        (step, env), final = ends
        true_last = TensorDict({"observation": final}, final.batch_size)
        if remembers:
            # computed here, because the root has the memory of the next episode
            before = rollout.select(*policy.in_keys, "action")[step, env]
            true_last.set(POLICY_MEMORY, policy.remember(before))
        following[step, env] = policy.value(true_last)
    return following


class BaseCollector:
    """The interface between a phase and its collector: one env, groups of robots, or an actor process."""

    env: Any  # an Env, a GroupedEnv or a RemoteEnv
    policy: Policy
    stopwatch: Stopwatch
    version: int  # number of changes of the weights
    env_steps: int  # env steps executed so far; if rollouts hold episodes, those of valid decisions
    parity: Parity | None = None  # drift of the newest rollout, if the actor process has measured it

    @property
    def by_group(self) -> list["Collector"]:
        """The collectors that act, one per group of robots; empty if another process has them."""
        return []

    def collect(self, buffer: RolloutBuffer) -> None:
        """Fill a buffer with new transitions and complete it: log-probs, values, version, `next/value`."""

    def weights_changed(self) -> None:
        """Call after each update."""
        self.version += 1

    def pace(self, ess: float) -> None:
        """Adapt the allowed staleness to the effective sample size of the newest rollout, a share of its decisions."""

    def reseed(self, more: int) -> None:
        """Change the seeds of episodes and noise."""

    def record_video(self, robots: int) -> None:
        """Record the next episode of each of the first `robots` robots."""

    def drain_videos(self) -> list[EpisodeVideo]:
        """Videos of episodes that ended since the last call."""
        return []

    def drain_episodes(self) -> list[Episode]:
        """Episodes that ended since the last call."""
        return []

    def drain_stages(self) -> tuple[dict[str, float], list[Span]]:
        """Seconds of the stages, as metrics, and their spans, since the last call."""
        return {}, []

    def state_dict(self) -> dict | None:
        """The state for the next rollout, without the weights; None: nothing was collected yet."""

    def load_state_dict(self, state: dict) -> bool:
        """Continue from a `state_dict`. False: the state of an env was not restored; it starts new episodes."""
        return True

    def discard_robot_states(self) -> None:
        """Discard the states of the robots after a failure, so that the next rollout (also after a resume) starts new
        episodes."""

    @contextmanager
    def _acting(self, robots: int) -> Iterator[None]:
        """Handle errors of acting; `robots`: the number of robots per decision."""
        try:
            with explain_oom("acting", self.policy, robots, "rollout.n_envs"):
                yield
        except Exception:
            self.discard_robot_states()
            raise


class Collector(BaseCollector):
    """Collects transitions of a policy in an env, decision by decision.

    `greedy`: the policy gets no noise (only `start`, if it needs that), so it acts by its mode. With `episodes`, a
    rollout has that many complete episodes of every robot, all from a reset. Without, it has as many decisions as the
    buffer takes, and episodes continue in the next rollout.
    """

    # for the message if the policy has diverged
    advice = "train it with a lower learning rate"

    def __init__(
        self,
        env: Env,
        policy: Policy,
        seed: int,
        split: str = "train",
        greedy: bool = False,
        chunk: int = 1,
        episodes: int | None = None,
    ):
        self.env, self.policy, self.chunk = env, policy, chunk
        self.seed, self.split, self.episodes_each = seed, split, episodes
        self.noise_name, self.noise_size = ("start", policy.start_size) if greedy else ("noise", policy.noise_size)
        if not greedy and not self.noise_size:
            advice = "set it to the number of uniform numbers per decision, and draw the action from td['noise']"
            raise UserError(f"{type(policy).__name__}.noise_size is 0, so it cannot sample actions; {advice}")
        self.version = self.env_steps = 0
        # number of decisions so far (the index of the noise), and of rollouts of whole episodes (for their seeds)
        self.decision = self.batches = 0
        self.episodes: list[Episode] = []
        self.tracker: EpisodeTracker  # sums over the running episodes; created when they start
        self.camera = Camera(env)
        self.stopwatch = Stopwatch("collector")
        self.root: TensorDict | None = None  # input of the next decision; None: reset first
        self._actions: TensorDict | None = None  # the newest actions of the policy, on the CPU

    @property
    def by_group(self) -> list["Collector"]:
        return [self]

    def start(self) -> None:
        """Reset all robots and check the contract for the first observation."""
        with self.stopwatch.stage("reset", self.version):
            self.root = self.env.reset(self.seed, self.split, self.batches * (self.episodes_each or 0))
        check_observation(self.root, self.env.spec, "env.reset")
        if self.policy.memory_size:
            memory = torch.zeros(self.env.num_envs, self.policy.memory_size, device=self.env.device)
            self.root.set(POLICY_MEMORY, memory)
        self.tracker = EpisodeTracker(self.env.num_envs)
        self.camera.reset()

    @torch.inference_mode()
    def decide(self) -> TensorDict:
        """Make one decision; returns the transition [N]. Its inference tensors cannot be used for training."""
        with self._acting(self.env.num_envs):
            return self.simulate(self.infer(self.noise(1)[0]))

    def collect(self, buffer: RolloutBuffer) -> None:
        with self._acting(self.env.num_envs), self.stopwatch.stage("collect", self.version):
            buffer.start()
            ended = None
            # inference tensors are cheap but cannot be used for training; the buffer copies them
            with torch.inference_mode():
                if self.episodes_each is None:
                    for noise in self.noise(buffer.steps):
                        buffer.add(self.simulate(self.infer(noise)))
                else:
                    ended = self._play_episodes(buffer)
            with self.stopwatch.stage("complete", self.version):
                check = self.decision == buffer.steps
                root = cast(TensorDict, self.root)
                self.camera.set_values(complete_rollout(self.policy, buffer, root, self.version, check))
                if ended is not None:
                    # [T, N]
                    episode = ended * self.env.num_envs + np.arange(self.env.num_envs)
                    columns = {"valid": ended < self.episodes_each, "episode": episode}
                    columns["group"] = episode // self.env.group_size
                    for name, column in columns.items():
                        buffer.set(name, torch.from_numpy(column).to(self.env.device))

    def discard_robot_states(self) -> None:
        self.root = None

    def _play_episodes(self, buffer: RolloutBuffer) -> np.ndarray:
        """Run the episodes; returns `[T, N]`, the number of episodes that each robot had ended before each decision.

        A robot that has ended its episodes continues until all have: the env steps all robots together.
        """
        self.start()
        ended, rows, clock = np.zeros(self.env.num_envs, np.int64), [], self.decision
        for noise in self.noise(buffer.steps):
            rows.append(ended.copy())
            buffer.add(self.simulate(self.infer(noise), ended < self.episodes_each))
            ended[self.env.last.ended] += 1
            if (ended >= self.episodes_each).all():
                break
        else:
            raise UserError(
                f"after {buffer.steps} decisions robots {np.flatnonzero(ended < self.episodes_each).tolist()} have not "
                f"ended their {self.episodes_each} episodes; set rollout.max_episode_steps"
            )
        # count all decisions of the buffer, so that noise does not depend on the lengths of episodes in this process
        self.decision = clock + buffer.steps
        self.batches += 1
        return np.stack(rows)

    def infer(self, noise: torch.Tensor | None) -> TensorDict:
        """The first half of a decision: returns `[N]` with the policy's `action`."""
        if self.root is None:
            self.start()
        with self.stopwatch.stage("infer", self.version):
            td = cast(TensorDict, self.root)
            if noise is not None:
                td.set(self.noise_name, noise)
            td = self.policy.act(td)
            if self.decision == 0:
                check_decision(td, self.chunk, self.env.spec.action_dim, "policy.act")
            # copied now, while only the policy is queued on the device; a later copy could wait for other kernels
            on_cpu = td["action"].device.type == "cpu"
            self._actions = td if on_cpu else TensorDict({"action": td["action"].cpu()}, td.batch_size)
            if not np.isfinite(self._actions["action"].numpy()).all():
                what = "training has diverged: actions of the policy are NaN or infinite"
                raise Diverged(f"{what}; {self.advice}", td)
        return td

    def simulate(self, td: TensorDict, counted: np.ndarray | None = None) -> TensorDict:
        """The second half: steps the env, adds `next/*` to `td` and sets `self.root` for the next decision.

        `counted` [N]: the robots whose steps and episodes count; None: all. With several groups, each has a thread.
        """
        with torch.inference_mode(), self.stopwatch.stage("simulate", self.version):
            after = self.env.step(self._actions)
            if self.decision == 0:
                check_step(after, self.env.spec, self.chunk, "env.step")
            if self.policy.memory_size:
                # [N, M]
                memory = self.policy.remember(td)
                if self.decision == 0:
                    check_memory(memory, self.env.num_envs, self.policy.memory_size, "policy.remember")
                after.set(POLICY_MEMORY, torch.where(after["is_first"][:, None], 0.0, memory))
            td.set("next", after.pop("next"))
            self.root = after
            self.decision += 1
            executed = self.env.last.executed
            self.env_steps += int(executed.sum() if counted is None else executed[counted].sum())
            ended = [e for e in self.tracker.add(self.env.last) if counted is None or counted[e.env]]
            self.camera.add(td, ended)
            self.episodes += ended
        return td

    def reseed(self, more: int) -> None:
        self.seed += more

    def record_video(self, robots: int) -> None:
        self.camera.record_video(robots)

    def drain_videos(self) -> list[EpisodeVideo]:
        return self.camera.drain()

    def drain_stages(self) -> tuple[dict[str, float], list[Span]]:
        seconds, spans = self.stopwatch.drain()
        return {f"{stage}_seconds": seconds.get(stage, 0.0) for stage in ("simulate", "infer")}, spans

    def drain_episodes(self) -> list[Episode]:
        episodes, self.episodes = self.episodes, []
        return episodes

    def noise(self, decisions: int) -> Sequence[torch.Tensor | None]:
        """Draw noise `[N, Z]` for each of the next decisions; None if acting needs none."""
        if not self.noise_size:
            return [None] * decisions
        offset = _EVAL_NOISE if self.split == "eval" else 0
        envs = np.arange(self.env.num_envs) + self.env.first_env
        clock = (np.arange(decisions) + self.decision) // self.policy.noise_hold + offset
        # noise that is constant over several decisions is drawn once
        ticks, tick_of = np.unique(clock, return_inverse=True)
        noise = torch.from_numpy(keyed_uniform(self.seed, envs, ticks, self.noise_size)).to(self.env.device)
        return [noise[tick] for tick in tick_of]

    def state_dict(self) -> dict:
        """`env` is None if the env has no state to save, or if every rollout starts with a reset."""
        state: dict[str, Any] = {"decision": self.decision, "env_steps": self.env_steps, "version": self.version}
        if self.episodes_each is not None:
            return state | {"batches": self.batches, "env": None, "root": None}
        state |= {"tracker": None, "env": None, "root": None}
        # after `discard_robot_states` the env may be broken
        if self.root is not None:
            state["tracker"] = self.tracker.state_dict()
            if (env := self.env.state()) is not None:
                state["env"] = {name: torch.from_numpy(np.asarray(array)) for name, array in env.items()}
            cpu = torch.device("cpu")
            root = self.root.exclude("noise").apply(lambda tensor: tensor.to(cpu, copy=True), device=cpu)
            state["root"] = root.to_dict()
        return state

    def load_state_dict(self, state: dict) -> bool:
        self.decision, self.env_steps, self.version = state["decision"], state["env_steps"], state["version"]
        if self.episodes_each is not None:
            self.batches = state["batches"]
            return True
        if state["env"] is None or state["root"] is None:
            return False
        self.env.set_state({name: tensor.numpy() for name, tensor in state["env"].items()})
        self.tracker = EpisodeTracker(self.env.num_envs)
        self.tracker.load_state_dict(state["tracker"])
        self.root = TensorDict(state["root"], [self.env.num_envs]).to(self.env.device)
        return True
