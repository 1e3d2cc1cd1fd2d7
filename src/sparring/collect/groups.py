"""Robots in groups: while one group simulates in a separate thread, the policy acts for another.

Simulators release Python's global lock (mujoco, numba, worker processes), so both run in parallel. The policy acts for
the groups in a fixed order, so results do not depend on timing.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from tensordict import TensorDict

from sparring.collect.camera import Episode, EpisodeVideo
from sparring.collect.collector import BaseCollector, Collector, Span, Stopwatch, complete_rollout
from sparring.contract import EnvSpec
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env

# timeout for the running step of a group after a failure in another group
_STOP_S = 1.0


class GroupedEnv:
    """The envs of all groups as one env, without reset and step."""

    def __init__(self, envs: list[Env]):
        self.envs = envs
        self.num_envs = sum(env.num_envs for env in envs)
        self.device, self.config = envs[0].device, envs[0].config

    @property
    def spec(self) -> EnvSpec:
        """The spec of the first env that reports success, because an env may do so only later; else of the first."""
        return next((env.spec for env in self.envs if env.spec.reports_success), self.envs[0].spec)

    def close(self) -> None:
        """Close all envs, even if one raises."""
        with ExitStack() as closing:
            for env in reversed(self.envs):
                closing.callback(env.close)


class GroupedCollector(BaseCollector):
    """One collector per group, which together fill one rollout [T, N]."""

    def __init__(self, env: GroupedEnv, collectors: list[Collector]):
        self.env, self.collectors, self.policy = env, collectors, collectors[0].policy
        # the threads of the groups use this thread's CUDA stream, so that the GPU executes their work in order
        on_gpu = env.device.type == "cuda"
        begin = partial(torch.cuda.set_stream, torch.cuda.current_stream(env.device)) if on_gpu else None
        # one thread per group, because some renderers must be called from one thread only
        self.threads = [ThreadPoolExecutor(1, f"group {g}", begin) for g in range(len(collectors))]
        self.stopwatch = Stopwatch("collector")
        for g, collector in enumerate(collectors):
            collector.stopwatch = Stopwatch(f"collector {g}")

    @property
    def by_group(self) -> list[Collector]:
        return self.collectors

    @property
    def version(self) -> int:
        return self.collectors[0].version

    @version.setter
    def version(self, version: int) -> None:
        for collector in self.collectors:
            collector.version = version

    @property
    def env_steps(self) -> int:
        return sum(collector.env_steps for collector in self.collectors)

    def collect(self, buffer: RolloutBuffer) -> None:
        with self._acting(self.collectors[0].env.num_envs), self.stopwatch.stage("collect", self.version):
            buffer.start()
            with torch.inference_mode():
                self._act(buffer)
            with self.stopwatch.stage("complete", self.version):
                first = self.collectors[0].decision == buffer.steps
                root = torch.cat([collector.root for collector in self.collectors])  # type: ignore[misc]
                values = complete_rollout(self.policy, buffer, cast(TensorDict, root), self.version, check=first)
                # the robots of the first group are the first columns
                self.collectors[0].camera.set_values(values)

    def discard_robot_states(self) -> None:
        """Wait for the running step of each group, but not for one that hangs."""
        for thread, collector in zip(self.threads, self.collectors, strict=True):
            with suppress(TimeoutError):
                thread.submit(collector.discard_robot_states).result(_STOP_S)
            collector.discard_robot_states()

    def _act(self, buffer: RolloutBuffer) -> None:
        for thread, collector in zip(self.threads, self.collectors, strict=True):
            if collector.root is None:
                thread.submit(collector.start).result()
        noise = [collector.noise(buffer.steps) for collector in self.collectors]
        simulating: list[Future[TensorDict]] = []
        for step in range(buffer.steps):
            before, simulating, transitions = simulating, [], []
            for g, collector in enumerate(self.collectors):
                if before:
                    transitions.append(before[g].result())
                td = collector.infer(noise[g][step])
                simulating.append(self.threads[g].submit(collector.simulate, td))
            if before:
                # all groups simulate during this copy
                buffer.add(torch.cat(transitions))  # type: ignore[arg-type]
        buffer.add(torch.cat([future.result() for future in simulating]))  # type: ignore[arg-type]

    def reseed(self, more: int) -> None:
        for collector in self.collectors:
            collector.reseed(more)

    def record_video(self, robots: int) -> None:
        """Record robots of the first group."""
        self.collectors[0].record_video(robots)

    def drain_videos(self) -> list[EpisodeVideo]:
        return self.collectors[0].drain_videos()

    def drain_episodes(self) -> list[Episode]:
        """Robots are numbered over all groups."""
        episodes, first = [], 0
        for collector in self.collectors:
            episodes += [replace(e, env=e.env + first) for e in collector.drain_episodes()]
            first += collector.env.num_envs
        return episodes

    def drain_stages(self) -> tuple[dict[str, float], list[Span]]:
        """Seconds of simulating are means over the groups, which run in parallel; seconds of acting are sums."""
        drained = [collector.drain_stages() for collector in self.collectors]
        seconds = {name: sum(metrics[name] for metrics, _ in drained) for name in drained[0][0]}
        seconds["simulate_seconds"] /= len(drained)
        return seconds, [*self.stopwatch.drain()[1], *(span for _, spans in drained for span in spans)]

    def state_dict(self) -> dict:
        groups = [collector.state_dict() for collector in self.collectors]
        return {"groups": groups, "env_steps": self.env_steps, "version": self.version}

    def load_state_dict(self, state: dict) -> bool:
        loaded = [c.load_state_dict(group) for c, group in zip(self.collectors, state["groups"], strict=True)]
        self.version = state["version"]
        return all(loaded)
