"""`finetune`: reinforcement learning on a task. Collect a rollout, update the policy, repeat."""

import time
from dataclasses import asdict
from statistics import fmean
from typing import Self

from sparring.algorithms.ppo import Algorithm
from sparring.collect.camera import Episode, EpisodeVideo
from sparring.collect.collector import Collector, Span, Stopwatch
from sparring.config.schema import Config
from sparring.config.section import Section
from sparring.contract import EnvSpec
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.phases.build import build_algorithm, build_collector, build_env
from sparring.phases.phase import Phase, Progress
from sparring.policies.policy import Policy, make_policy
from sparring.processes.distributed import Distributed, fail_together
from sparring.rewards.added_rewards import AddedRewards
from sparring.rewards.reward_model import RewardModel
from sparring.world_models.imagined_env import ImaginedEnv


class Finetune(Phase):
    """Alternates between rollouts and updates. `rewards`, if given, replace the env's rewards or add to them."""

    default_limit = ("total_timesteps", 150_000)
    accuracy = "success_rate"
    # number of first updates whose timeline has every stage; later ones have the main stages only
    detailed_updates = 20

    def __init__(
        self,
        env: Env,
        policy: Policy,
        algorithm,
        buffer: RolloutBuffer,
        distributed: Distributed,
        collector=None,
        rewards: RewardModel | AddedRewards | None = None,
    ):
        # eval mode: dropout would make acting and scoring differ
        self.model = self.policy = policy.eval()
        self.env, self.algorithm, self.distributed = env, algorithm, distributed
        self.buffer, self.rewards = buffer, rewards
        self.collector = collector or Collector(env, policy, seed=0)
        if isinstance(algorithm, Algorithm):
            # the algorithm may have made updates already
            self.collector.version = algorithm.version
        self.stopwatch = Stopwatch("learner")
        self.spans: list[Span] = []
        self.learning = False
        self.progress = Progress()

    @classmethod
    def from_config(cls, config: Config, distributed: Distributed) -> "Finetune":
        env, policy, algorithm = cls.build_learner(config, distributed)
        return cls.of(config, env, policy, algorithm, distributed, cls.build_rewards(config, env, distributed))

    @classmethod
    def build_learner(cls, config: Config, distributed: Distributed) -> tuple:
        """Build env, policy and algorithm."""
        env = build_env(config, distributed)
        spec = cls.policy_spec(config, env.spec)
        policy = make_policy(config.policy, spec, config.rollout.action_steps, distributed.device)
        return env, policy, build_algorithm(config, cls.algorithm_config(config), policy, distributed)

    @classmethod
    def of(
        cls,
        config: Config,
        env: Env,
        policy: Policy,
        algorithm,
        distributed: Distributed,
        rewards: RewardModel | AddedRewards | None = None,
    ) -> Self:
        """Create the phase from existing parts; the config determines how rollouts are collected."""
        if config.rollout.mode == "async" and config.rollout.staleness and isinstance(algorithm, Algorithm):
            algorithm.expect_stale()
        collector, buffer = build_collector(config, env, policy)
        return cls(env, policy, algorithm, buffer, distributed, collector, rewards)

    @staticmethod
    def policy_spec(config: Config, spec: EnvSpec) -> EnvSpec:
        """The policy's part of the env's observations."""
        return spec

    @staticmethod
    def algorithm_config(config: Config) -> Section:
        return config.algorithm_section

    @staticmethod
    def build_rewards(config: Config, env: Env, distributed: Distributed) -> RewardModel | AddedRewards | None:
        """Build the rewards that are added to those of the env or replace them."""
        if not config.rewards.terms:
            return None
        return AddedRewards(config.rewards, env, config.rollout.action_steps, distributed)

    @property
    def learns_from(self) -> str:
        robots = self.env.num_envs * self.distributed.world_size
        where = " in a world model's imagination" if isinstance(self.env, ImaginedEnv) else ""
        return f"{robots} robots{where}, by {type(self.algorithm).__name__}"

    def step(self, fraction: float) -> dict[str, float]:
        self.learning = False
        return self.collect_and_learn(fraction)

    def collect_and_learn(self, fraction: float, learns: bool = True) -> dict[str, float]:
        """Collect a rollout with its rewards and, if `learns`, update the policy from it."""
        started, steps_before = time.perf_counter(), self.collector.env_steps
        if learns and isinstance(self.algorithm, Algorithm) and self.policy.needs_statistics:
            self._warm_up()
        with fail_together(self.distributed):
            stages = self.collect()
        # reward models learn as well; added rewards do not
        self.learning = not isinstance(self.rewards, AddedRewards)
        collected = self.add_rewards() | {"collect_seconds": time.perf_counter() - started} | stages
        # sum over processes: chunks and episodes may end early, in some processes more often
        self.progress.env_steps += sum(self.distributed.gather_objects([self.collector.env_steps - steps_before]))
        episodes = self.distributed.gather_objects(self.collector.drain_episodes())
        self.progress.episodes += len(episodes)
        collected = self.episode_metrics(episodes) | collected
        if not learns:
            return collected
        self.learning = True
        started = time.perf_counter()
        metrics = self.learn(fraction)
        self.collector.weights_changed()
        return metrics | {"update_seconds": time.perf_counter() - started} | collected

    def collect(self) -> dict[str, float]:
        """Fill the buffer with a rollout; returns the seconds of its stages."""
        self.collector.collect(self.buffer)
        seconds, spans = self.collector.drain_stages()
        self.spans += spans
        return seconds

    def _warm_up(self) -> None:
        """Fit the policy's normalisers to a first rollout: fitting them after an update would undo a part of it."""
        with fail_together(self.distributed):
            self.collect()
        self._check_remote_parity()
        # reward models and recorders need every rollout: their memories and episodes continue in the next one
        self.learning = True
        self.add_rewards()
        self.algorithm.warm_up(self.buffer.rollout())
        self.learning = False
        self.collector.weights_changed()

    def add_rewards(self) -> dict[str, float]:
        return self.rewards.write_rewards(self.buffer) if self.rewards else {}

    def learn(self, fraction: float) -> dict[str, float]:
        """Update the policy from the rollout in the buffer."""
        with self.stopwatch.stage("learn", self.collector.version):
            measured = self._check_remote_parity()
            metrics = self.algorithm.update(self.buffer.rollout(), fraction)
            # the maximum of both parity gates: each one checks what the other cannot
            metrics |= {name: max(metrics.get(name, 0.0), value) for name, value in measured.items()}
            metrics |= {"parity_skipped": 0.0} if measured else {}
        self.spans += self.stopwatch.drain()[1]
        if "ess" in metrics:
            self.collector.pace(metrics["ess"])
        self.progress.updates += 1
        return metrics

    def _check_remote_parity(self) -> dict[str, float]:
        """Pass the drift measured by the actor process, which scored with the acting weights, to the parity gate."""
        if self.collector.parity is None:
            return {}
        parity = self.algorithm.gate(self.collector.parity)
        return {"parity": parity.drift, "parity_ratio": parity.ratio}

    def record_video(self, episodes: int) -> None:
        self.collector.record_video(episodes)

    def drain_videos(self) -> list[EpisodeVideo]:
        return self.collector.drain_videos()

    def drain_spans(self) -> list[Span]:
        spans, self.spans = self.spans, []
        detailed = self.progress.updates <= self.detailed_updates
        return spans if detailed else [span for span in spans if span.stage in ("collect", "wait", "learn")]

    def state_dict(self) -> dict:
        state = {"progress": asdict(self.progress), "algorithm": self.algorithm.state_dict()}
        return state | ({"rewards": self.rewards.state_dict()} if self.rewards else {})

    def process_state(self) -> dict:
        state = {"collector": self.collector.state_dict()}
        return state | ({"rewards": self.rewards.process_state()} if self.rewards else {})

    def load_state_dict(self, state: dict, process_state: dict) -> list[str]:
        self.progress = Progress(**state["progress"])
        self.algorithm.load_state_dict(state["algorithm"])
        if self.rewards:
            self.rewards.load_state_dict(state["rewards"], process_state["rewards"])
        if self.collector.load_state_dict(process_state["collector"]):
            return []
        # new seeds for the new episodes, because the old ones were used
        self.collector.reseed(self.progress.updates)
        return ["the state of the env cannot be restored; its robots start new episodes"]

    def episode_metrics(self, episodes: list[Episode]) -> dict[str, float]:
        """Returns means over the episodes that ended; empty if there are none."""
        if not episodes:
            return {}
        names = {"episode_reward": "reward", "episode_length": "steps"}
        names |= {"success_rate": "success"} if self.env.spec.reports_success else {}
        return {name: fmean(getattr(episode, field) for episode in episodes) for name, field in names.items()}
