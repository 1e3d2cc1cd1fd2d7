"""Robots in groups: while one group simulates, in a thread of its own, the policy decides for another.

Simulators release Python's lock (mujoco, numba, worker processes), so both go on at the same time. Groups are served in
turn, always in the same order: the same batches meet the same weights, whatever the timing.
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

# seconds that a group gets to end its step, after another one failed
_PATIENCE_S = 1.0


class GroupedEnv:
    """The envs of all groups as one, for all but stepping them."""

    def __init__(self, envs: list[Env]):
        self.envs = envs
        self.num_envs = sum(env.num_envs for env in envs)
        self.device, self.config = envs[0].device, envs[0].config

    @property
    def spec(self) -> EnvSpec:
        """An env may find out on the way that it reports success."""
        return next((env.spec for env in self.envs if env.spec.reports_success), self.envs[0].spec)

    def close(self) -> None:
        """All of them, also where one raises."""
        with ExitStack() as closing:
            for env in reversed(self.envs):
                closing.callback(env.close)


class GroupedCollector(BaseCollector):
    """One collector for each group, in the place of a single one: they fill one rollout [T, N] together."""

    def __init__(self, env: GroupedEnv, collectors: list[Collector]):
        self.env, self.collectors, self.policy = env, collectors, collectors[0].policy
        # a GPU does in order what this thread and those of the groups ask for
        on_gpu = env.device.type == "cuda"
        begin = partial(torch.cuda.set_stream, torch.cuda.current_stream(env.device)) if on_gpu else None
        # a thread for each: some renderers want to be called from one thread only
        self.threads = [ThreadPoolExecutor(1, f"group {g}", begin) for g in range(len(collectors))]
        self.stopwatch = Stopwatch("collector")
        for g, collector in enumerate(collectors):
            collector.stopwatch = Stopwatch(f"collector {g}")

    @property
    def lanes(self) -> list[Collector]:
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
                # its robots are the first of all
                self.collectors[0].camera.appraise(values)

    def forget_robots(self) -> None:
        """Each when what it simulates is done; one that hangs is not waited for."""
        for thread, collector in zip(self.threads, self.collectors, strict=True):
            with suppress(TimeoutError):
                thread.submit(collector.forget_robots).result(_PATIENCE_S)
            collector.forget_robots()

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
                # all groups simulate meanwhile
                buffer.add(torch.cat(transitions))  # type: ignore[arg-type]
        buffer.add(torch.cat([future.result() for future in simulating]))  # type: ignore[arg-type]

    def reseed(self, more: int) -> None:
        for collector in self.collectors:
            collector.reseed(more)

    def record_video(self, robots: int) -> None:
        """Of the first group."""
        self.collectors[0].record_video(robots)

    def drain_videos(self) -> list[EpisodeVideo]:
        return self.collectors[0].drain_videos()

    def drain_episodes(self) -> list[Episode]:
        """Numbered as if there were one group."""
        episodes, first = [], 0
        for collector in self.collectors:
            episodes += [replace(e, env=e.env + first) for e in collector.drain_episodes()]
            first += collector.env.num_envs
        return episodes

    def drain_stages(self) -> tuple[dict[str, float], list[Span]]:
        """Of simulating, the mean over the groups, which simulate at the same time; of deciding, the sum."""
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
