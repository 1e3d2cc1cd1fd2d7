"""`finetune`: task RL. Collect a rollout, update the policy, repeat."""

import time
from dataclasses import asdict

from torch import nn

from sparring.algorithms.make import make_algorithm
from sparring.collect.camera import Film
from sparring.collect.collector import Collector
from sparring.collect.episodes import Episode
from sparring.data.buffer import Buffer
from sparring.data.make import make_buffer
from sparring.distributed import Distributed
from sparring.envs.env import Env
from sparring.envs.make import make_env
from sparring.errors import UserError
from sparring.phases.phase import Progress
from sparring.policies.make import make_policy
from sparring.policies.policy import Policy


class Finetune:
    """An env, a policy and an algorithm, taking turns."""

    default_limit = ("total_timesteps", 150_000)

    def __init__(
        self,
        env: Env,
        policy: Policy,
        algorithm,
        buffer: Buffer,
        distributed: Distributed,
        seed: int = 0,
        chunk: int = 1,
        episodes: int | None = None,
    ):
        """`episodes` of each robot between two updates; None: as many decisions as the buffer holds."""
        # what acts and what is scored must be the same: no dropout
        policy.eval()
        self.env, self.policy, self.algorithm, self.distributed = env, policy, algorithm, distributed
        self.buffer = buffer
        self.collector = Collector(env, policy, seed, chunk=chunk, episodes=episodes)
        self.progress = Progress()

    @classmethod
    def from_config(cls, config, distributed: Distributed) -> "Finetune":
        rollout = config.rollout
        env = make_env(
            config.env,
            rollout.n_envs,
            rollout.max_episode_steps,
            distributed.device,
            first_env=distributed.rank * rollout.n_envs,
            total_envs=distributed.world_size * rollout.n_envs,
            group_size=rollout.group_size,
        )
        policy = make_policy(config.policy, env.spec, rollout.action_steps).to(distributed.device)
        algorithm = make_algorithm(config.algorithm, config.algorithm_section, policy, distributed, config.seed)
        return cls.of(config, env, policy, algorithm, distributed)

    @classmethod
    def of(cls, config, env: Env, policy: Policy, algorithm, distributed: Distributed) -> "Finetune":
        """Of parts that are there already; the config says how rollouts are made of them."""
        rollout, episodes, steps = config.rollout, None, config.rollout_steps
        if rollout.n_episodes_per_batch:
            episodes = rollout.n_episodes_per_batch // rollout.n_envs
            steps = episodes * _decisions_of_an_episode(env, rollout.action_steps)
        buffer = make_buffer(config.buffer, steps, rollout.n_envs, config.run_folder)
        return cls(env, policy, algorithm, buffer, distributed, config.seed, rollout.action_steps, episodes)

    @property
    def model(self) -> nn.Module:
        return self.policy

    @property
    def learns_from(self) -> str:
        robots = self.env.num_envs * self.distributed.world_size
        return f"{robots} robots, by {type(self.algorithm).__name__}"

    def step(self, fraction: float) -> dict[str, float]:
        started, steps_before = time.perf_counter(), self.collector.env_steps
        self.collector.collect(self.buffer)
        collected = time.perf_counter()
        metrics = self.algorithm.update(self.buffer.rollout(), fraction)
        updated = time.perf_counter()
        self.collector.version += 1
        episodes = self.distributed.gather_objects(self.collector.drain_episodes())
        # every process runs as many robots; chunks and episodes may end early, so steps are summed
        steps = self.distributed.mean({"steps": self.collector.env_steps - steps_before})["steps"]
        self.progress.updates += 1
        self.progress.env_steps += round(steps * self.distributed.world_size)
        self.progress.episodes += len(episodes)
        metrics |= _episode_metrics(episodes, self.env.spec.reports_success)
        return metrics | {"collect_seconds": collected - started, "update_seconds": updated - collected}

    def film(self, episodes: int) -> None:
        self.collector.camera.film(episodes)

    def drain_films(self) -> list[Film]:
        return self.collector.camera.drain()

    def state_dict(self) -> dict:
        return {"progress": asdict(self.progress), "algorithm": self.algorithm.state_dict()}

    def process_state(self) -> dict:
        return {"collector": self.collector.state_dict()}

    def load_state_dict(self, state: dict, process_state: dict) -> list[str]:
        self.progress = Progress(**state["progress"])
        self.algorithm.load_state_dict(state["algorithm"])
        if self.collector.load_state_dict(process_state["collector"]):
            return []
        # new seeds for the new episodes: the old ones were used
        self.collector.seed += self.progress.updates
        return ["the env cannot be put back to where it was; its robots start new episodes"]


def _decisions_of_an_episode(env: Env, chunk: int) -> int:
    limit = env.spec.max_episode_steps
    if not limit:
        raise UserError(
            "rollout.n_episodes_per_batch: this env does not say how long its episodes may last; "
            "set rollout.max_episode_steps"
        )
    return -(-limit // chunk)


def _episode_metrics(episodes: list[Episode], with_success: bool) -> dict[str, float]:
    """Means over the episodes that ended; nothing where none did."""
    if not episodes:
        return {}
    count = len(episodes)
    means = {
        "episode_reward": sum(e.reward for e in episodes) / count,
        "episode_length": sum(e.steps for e in episodes) / count,
    }
    return means | ({"success_rate": sum(e.success for e in episodes) / count} if with_success else {})
