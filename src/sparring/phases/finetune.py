"""`finetune`: task RL. Collect a rollout, update the policy, repeat."""

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
    """An env, a policy and an algorithm, taking turns. Where there are `rewards`, they write what it learns from."""

    default_limit = ("total_timesteps", 150_000)
    accuracy = "success_rate"
    # the first rollouts of a run, whose timeline has every stage; later ones have the outlines only
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
        # what acts and what is scored must be the same: no dropout
        self.model = self.policy = policy.eval()
        self.env, self.algorithm, self.distributed = env, algorithm, distributed
        self.buffer, self.rewards = buffer, rewards
        self.collector = collector or Collector(env, policy, seed=0)
        if isinstance(algorithm, Algorithm):
            # it may have learned before
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
        """Env, policy and algorithm."""
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
        """From parts that exist already; the config says how they make rollouts."""
        if config.rollout.mode == "async" and config.rollout.staleness and isinstance(algorithm, Algorithm):
            algorithm.expect_stale()
        collector, buffer = build_collector(config, env, policy)
        return cls(env, policy, algorithm, buffer, distributed, collector, rewards)

    @staticmethod
    def policy_spec(config: Config, spec: EnvSpec) -> EnvSpec:
        """What the policy sees of what the env shows."""
        return spec

    @staticmethod
    def algorithm_config(config: Config) -> Section:
        return config.algorithm_section

    @staticmethod
    def build_rewards(config: Config, env: Env, distributed: Distributed) -> RewardModel | AddedRewards | None:
        """What is rewarded beside what the env rewards, or instead of it."""
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
        return self.turn(fraction)

    def turn(self, fraction: float, learns: bool = True) -> dict[str, float]:
        """A rollout with its rewards and, where it `learns`, an update from it."""
        started, steps_before = time.perf_counter(), self.collector.env_steps
        if learns and isinstance(self.algorithm, Algorithm) and self.policy.needs_statistics:
            self._warm_up()
        with fail_together(self.distributed):
            stages = self.collect()
        # rewards learn, too, but for those that are only added
        self.learning = not isinstance(self.rewards, AddedRewards)
        collected = self.add_rewards() | {"collect_seconds": time.perf_counter() - started} | stages
        # chunks and episodes may end early, in some processes more than in others
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
        """Fill the buffer with a rollout; the seconds of its stages."""
        self.collector.collect(self.buffer)
        figures, spans = self.collector.drain_stages()
        self.spans += spans
        return figures

    def _warm_up(self) -> None:
        """Fit the policy's normalisers to a first rollout: fitted after an update, they would undo a part of it."""
        with fail_together(self.distributed):
            self.collect()
        self._check_remote_parity()
        # what judges and records rollouts must see all of them: its memories and episodes go on in the next one
        self.learning = True
        self.add_rewards()
        self.algorithm.warm_up(self.buffer.rollout())
        self.learning = False
        self.collector.weights_changed()

    def add_rewards(self) -> dict[str, float]:
        return self.rewards.write_rewards(self.buffer) if self.rewards else {}

    def learn(self, fraction: float) -> dict[str, float]:
        """An update from the rollout in the buffer."""
        with self.stopwatch.stage("learn", self.collector.version):
            measured = self._check_remote_parity()
            metrics = self.algorithm.update(self.buffer.rollout(), fraction)
            # each compares what the other cannot
            metrics |= {name: max(metrics.get(name, 0.0), value) for name, value in measured.items()}
            metrics |= {"parity_skipped": 0.0} if measured else {}
        self.spans += self.stopwatch.drain()[1]
        if "ess" in metrics:
            self.collector.pace(metrics["ess"])
        self.progress.updates += 1
        return metrics

    def _check_remote_parity(self) -> dict[str, float]:
        """The collecting process scored its rollout again by the weights that made it; the gate judges that here."""
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
        in_full = self.progress.updates <= self.detailed_updates
        return spans if in_full else [span for span in spans if span.stage in ("collect", "wait", "learn")]

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
        # new seeds for the new episodes: the old ones were used
        self.collector.reseed(self.progress.updates)
        return ["the env cannot be put back to where it was; its robots start new episodes"]

    def episode_metrics(self, episodes: list[Episode]) -> dict[str, float]:
        """Means over the episodes that ended; nothing where none did."""
        if not episodes:
            return {}
        names = {"episode_reward": "reward", "episode_length": "steps"}
        names |= {"success_rate": "success"} if self.env.spec.reports_success else {}
        return {name: fmean(getattr(episode, field) for episode in episodes) for name, field in names.items()}
