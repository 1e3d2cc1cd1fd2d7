"""An env that fails when a file names a fault: during a run, in any process."""

import os
import time
from pathlib import Path

import numpy as np

from sparring.config.section import Section
from sparring.contract import EnvSpec
from sparring.envs.backend import EpisodeSeeds, Step
from sparring.policies.actor_critic import ActorCritic


class FailingConfig(Section):
    name: str = "doubles_failing:Failing"
    # contains the fault: raise, raise 1 (in rank 1 only), hang, slow SECONDS, reset by peer, wrong numbers
    file: str = ""
    # seconds of a step, and of close()
    slow: float = 0.0
    slow_close: float = 0.0


class Failing:
    """Observes the last action; the reward is highest for its opposite. Writes its process id to `file`.pid."""

    def __init__(self, config: FailingConfig, num_envs: int, max_episode_steps: int | None = None):
        self.num_envs, self.slow, self.slow_close = num_envs, config.slow, config.slow_close
        self.file = Path(config.file) if config.file else None
        self.limit = max_episode_steps or 7
        self.spec = EnvSpec({"state": ((2,), "float32")}, 1, max_episode_steps=self.limit, reports_success=False)
        if self.file:
            Path(f"{config.file}.pid").write_text(str(os.getpid()))

    def reset(self, seeds: EpisodeSeeds):
        self.seeds, self.episode, self.count = seeds, np.zeros(self.num_envs, int), np.zeros(self.num_envs, int)
        self.seen = self._first(range(self.num_envs))
        return {"state": self.seen.astype(np.float64) if self._fault() == "wrong numbers" else self.seen.copy()}

    def step(self, action):
        self._fail()
        time.sleep(self.slow)
        self.count += 1
        reward = 1 - np.abs(action[:, :, 0] + self.seen[:, :1])
        self.seen = np.stack([action[:, -1, 0], self.seen[:, 0] / 2], 1).astype(np.float32)
        done = self.count == self.limit
        ended = np.flatnonzero(done)
        final = {"state": self.seen[ended].copy()}
        self.episode[ended] += 1
        self.count[ended] = 0
        if len(ended):
            self.seen[ended] = self._first(ended)
        none, executed = np.zeros(self.num_envs, bool), np.full(self.num_envs, action.shape[1], np.int64)
        return Step({"state": self.seen.copy()}, reward.astype(np.float32), executed, none, done, none, ended, final)

    def record(self, envs): ...

    def render(self, env):
        return None

    def state(self):
        seeds = np.array([self.seeds.seed, self.seeds.first_env, self.seeds.total_envs])
        return {"episode": self.episode.copy(), "count": self.count.copy(), "seen": self.seen.copy(), "seeds": seeds}

    def set_state(self, state):
        seed, first, total = state["seeds"].tolist()
        self.seeds = EpisodeSeeds(seed, "train", first, total)
        self.episode, self.count, self.seen = (state[name].copy() for name in ("episode", "count", "seen"))

    def close(self):
        self._log_close("begins")
        time.sleep(self.slow_close)
        self._log_close("ends")

    def _log_close(self, event):
        if self.file:
            with open(f"{self.file}.closing", "a") as log:
                print(event, file=log)

    def _first(self, envs):
        seeds = [self.seeds(int(env), int(self.episode[env])) for env in envs]
        return np.array([np.random.default_rng(seed).uniform(-1, 1, 2) for seed in seeds], np.float32)

    def _fault(self):
        return self.file.read_text() if self.file and self.file.exists() else ""

    def _fail(self):
        fault = self._fault()
        # in all processes, or in one rank
        if fault in ("raise", f"raise {os.environ.get('RANK')}"):
            raise ZeroDivisionError("the gripper fell off")
        if fault == "reset by peer":
            raise ConnectionResetError("the simulator has gone")
        if fault == "hang":
            time.sleep(600)
        if fault.startswith("slow"):
            time.sleep(float(fault.split()[1]))


class InconsistentScores(ActorCritic):
    """Scores its decisions with a shifted mean."""

    def evaluate(self, td):
        scored = super().evaluate(td)
        scored["trace", "mean"] = scored["trace", "mean"] + 0.01
        return scored
