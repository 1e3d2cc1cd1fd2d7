"""`teacher`: a world model learns to predict what robots that act at random will see next."""

import time
from dataclasses import asdict
from pathlib import Path

import torch
from tensordict import TensorDict

from sparring.algorithms.world_model import WorldModelLearner
from sparring.collect.collector import Collector
from sparring.data.episodes import EpisodeStore
from sparring.data.recorder import EpisodeRecorder
from sparring.data.windows import SequentialWindows, ShuffledWindows
from sparring.envs.env import Env, make_training_env
from sparring.errors import UserError
from sparring.phases.build import together
from sparring.phases.configs import TeacherConfig
from sparring.phases.phase import Progress
from sparring.phases.replay import Foretold, Replay, foretold
from sparring.policies.random import ColouredNoise, share_of
from sparring.processes.distributed import Distributed
from sparring.world_models.world_model import MemoryStateManager, WorldModel, make_world_model

# what nobody learns from: a random policy's scores, and the memory of a world model that has changed since
_NOT_KEPT = ("noise", "trace", "log_prob", "value", "memory")


class Teacher:
    """Robots that act at random, a store of their episodes, and a world model, taking turns."""

    default_limit = ("iterations", 24)
    accuracy = "fresh_acc"

    def __init__(
        self,
        config: TeacherConfig,
        env: Env,
        model: WorldModel,
        learner: WorldModelLearner,
        distributed: Distributed,
        folder: Path,
        chunk: int,
        decisions: int,
        bptt_length: int,
        seed: int = 0,
    ):
        """`decisions` of each robot between two updates; episodes are kept under `folder`."""
        if not env.spec.max_episode_steps:
            raise UserError("teacher learns from whole episodes, and these have no end; set rollout.max_episode_steps")
        # it foretells without dropout, from the first update on
        model.eval()
        self.config, self.env, self.model, self.learner = config, env, model, learner
        self.distributed, self.seed = distributed, seed
        self.decisions, self.bptt_length = decisions, bptt_length
        # of a process each: robots, episodes and batches
        self.folder = folder / ("episodes" if distributed.is_main else f"episodes-{distributed.rank}")
        coloured = share_of(env.num_envs, config.coloured, env.first_env, len(set(env.spec.task_names)))
        self.explorer = ColouredNoise(env.spec, chunk, coloured * config.correlation).to(env.device)
        self.collector = Collector(env, self.explorer, seed, chunk=chunk)
        # what the world model remembers of each robot's episode, and how much of it it has foretold
        self.memory = MemoryStateManager(env.num_envs, model.memory_size, device=env.device)
        self.foretold = torch.zeros(env.num_envs, dtype=torch.float64, device=env.device)
        self.store: EpisodeStore | None = None
        self.learning = False
        self.progress = Progress()

    @classmethod
    def from_config(cls, config, distributed: Distributed) -> "Teacher":
        rollout = config.rollout
        env = make_training_env(config, distributed)
        model = make_world_model(config.world_model, env.spec, rollout.action_steps).to(distributed.device)
        return cls(
            config.teacher,
            env,
            model,
            WorldModelLearner(config.teacher, model, distributed),
            distributed,
            config.run_folder,
            rollout.action_steps,
            config.rollout_steps,
            config.training.bptt_length,
            config.seed,
        )

    @property
    def learns_from(self) -> str:
        robots = self.env.num_envs * self.distributed.world_size
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return f"{robots} robots that act at random, a world model of {parameters:,} parameters"

    def step(self, fraction: float) -> dict[str, float]:
        started, steps_before = time.perf_counter(), self.collector.env_steps
        self._open_store()
        self.learning = False
        with together(self.distributed):
            accuracy, rewards = self._collect()
        self.learning = True
        collected = time.perf_counter()
        self.replay.refresh()
        if fraction >= 0.5:
            self.model.settle()
        metrics = self.learner.update(self.replay, self.config.gradient_steps, fraction)
        updated = time.perf_counter()
        self.collector.version += 1
        rewards = self.distributed.gather_objects(rewards)
        # every process runs as many robots; chunks and episodes may end early, so steps are summed
        means = self.distributed.mean({"accuracy": accuracy, "steps": self.collector.env_steps - steps_before})
        self.progress.updates += 1
        self.progress.env_steps += round(means["steps"] * self.distributed.world_size)
        self.progress.episodes += len(rewards)
        metrics |= {"fresh_acc": means["accuracy"]}
        metrics |= {"episode_reward": sum(rewards) / len(rewards)} if rewards else {}
        return metrics | {"collect_seconds": collected - started, "update_seconds": updated - collected}

    def pictures(self) -> Foretold:
        """The newest episode, as the world model foretells it, decision by decision."""
        episode = self.store.episode(len(self.store) - 1).to(self.env.device)
        decision_rate = self.env.spec.control_hz / self.explorer.chunk
        return foretold(self.model, episode, decision_rate)

    def state_dict(self) -> dict:
        return {"progress": asdict(self.progress), "learner": self.learner.state_dict()}

    def process_state(self) -> dict:
        self._open_store()
        return {
            "collector": self.collector.state_dict(),
            "explorer": dict(self.explorer.state_dict()),
            "memory": self.memory.state_dict(),
            "foretold": self.foretold.cpu(),
            "store": self.store.state_dict(),
            "recorder": self.recorder.state_dict(),
            "replay": self.replay.state_dict(),
        }

    def load_state_dict(self, state: dict, process_state: dict) -> list[str]:
        self.progress = Progress(**state["progress"])
        self.learner.load_state_dict(state["learner"])
        lost = self._open_store(process_state["store"])
        self.replay.load_state_dict(process_state["replay"])
        self.explorer.load_state_dict(process_state["explorer"])
        self.memory.load_state_dict(process_state["memory"])
        self.foretold.copy_(process_state["foretold"])
        self.recorder.load_state_dict(process_state["recorder"])
        if self.collector.load_state_dict(process_state["collector"]):
            return lost
        # new seeds for the new episodes: the old ones were used
        self.collector.seed += self.progress.updates
        return [*lost, "the env cannot be put back to where it was; its robots start new episodes"]

    def close(self) -> None:
        """End what it has going: the env, the thread that makes batches, the store's lock on its folder."""
        self.env.close()
        if self.store is not None:
            self.replay.close()
            self.store.close()

    def _collect(self) -> tuple[float, list[float]]:
        """Let the robots act; the mean accuracy of what they saw, and its sum over each episode that ended.

        Before any of it is learned from: this is how well the world model foretells what it has not seen.
        """
        accuracies, rewards = [], []
        decisions = 0
        # the first update goes on until there is an episode to learn from
        while decisions < self.decisions or not len(self.store):
            td = self.collector.decide()
            self.recorder.add(td)
            accuracy, ended = self._foretell(td)
            accuracies.append(accuracy)
            rewards += ended
            decisions += 1
        return float(torch.stack(accuracies).mean()), rewards

    @torch.no_grad()
    def _foretell(self, td: TensorDict) -> tuple[torch.Tensor, list[float]]:
        """The mean accuracy of this decision's predictions, and the sums of the episodes that end with it."""
        # what the recorder keeps must stay as it is
        scored = self.model.score(self.memory.enter(td.clone(False)))
        self.memory.leave(scored["memory"])
        self.foretold = torch.where(td["is_first"], 0.0, self.foretold) + scored["accuracy"]
        ended = td["next", "terminated"] | td["next", "truncated"]
        return scored["accuracy"].mean(), self.foretold[ended].tolist()

    def _open_store(self, state: dict | None = None) -> list[str]:
        """Not before the first step: a run folder is written to only when all has been found to fit.

        What an earlier run left behind after its last checkpoint is forgotten. Returns what was lost, in words.
        """
        if self.store is not None:
            return []
        lost = []
        limit = int(self.config.max_gb * 1e9)
        self.store = EpisodeStore(self.folder, max_bytes=limit)
        wanted = state["next_number"] if state else 0
        if self.store.next_number < wanted:
            # a run that branched off from another's checkpoint
            lost.append(f"the {wanted} episodes collected so far are not in {self.folder}; collects new ones")
            wanted = 0
        self.store.load_state_dict({"next_number": wanted})
        self.recorder = EpisodeRecorder(
            self.store, self.env.num_envs, source="random", tasks=self.env.tasks, exclude=_NOT_KEPT
        )
        self.replay = self._replay()
        return lost

    def _replay(self) -> Replay:
        # each process draws its own
        seed, size = self.seed * 1009 + self.distributed.rank, self.config.batch_size
        if self.config.sequential:
            windows = SequentialWindows(self.store, self.bptt_length, size, seed)
        else:
            windows = ShuffledWindows(self.store, self.bptt_length, self.config.burn_in)
        return Replay(windows, size, self.model.memory_size, seed, self.distributed.device)
