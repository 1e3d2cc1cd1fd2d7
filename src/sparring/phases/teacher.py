"""`teacher`: a world model learns to predict the next frames of robots with random actions."""

import time
from dataclasses import asdict

import torch
from tensordict import TensorDict

from sparring.algorithms.world_model import WorldModelLearner
from sparring.collect.collector import Collector
from sparring.config.schema import Config
from sparring.data.episodes import EpisodeStore
from sparring.data.windows import SequentialWindows, ShuffledWindows
from sparring.envs.env import Env, make_training_env
from sparring.errors import UserError
from sparring.phases.phase import Phase, Progress
from sparring.phases.replay import EpisodeReplay, Prediction
from sparring.policies.random import ColouredNoise
from sparring.processes.distributed import Distributed, fail_together
from sparring.world_models.world_model import MemoryStateManager, WorldModel, make_world_model

# not recorded: scores of the random policy, and memories, which are outdated after an update
_NOT_RECORDED = ("noise", "trace", "log_prob", "value", "memory")


class Teacher(Phase):
    """Alternates between collecting random episodes and training the world model on all stored episodes."""

    default_limit = ("iterations", 24)
    accuracy = "fresh_acc"
    evaluation = "world_model"
    model: WorldModel

    def __init__(self, config: Config, env: Env, model: WorldModel, distributed: Distributed):
        if not env.spec.max_episode_steps:
            raise UserError("teacher needs complete episodes, but there is no limit; set rollout.max_episode_steps")
        # eval mode: no dropout in predictions, from the first update on
        self.env, self.model, self.distributed = env, model.eval(), distributed
        self.config, self.decisions = config.teacher, config.rollout_steps
        self.bptt_length = config.training.bptt_length
        self.learner = WorldModelLearner(
            config.teacher, model, distributed, "teacher", config.training.skip_nonfinite_steps
        )
        tasks = len(set(env.spec.task_names))
        coloured = ColouredNoise.share_of(env.num_envs, self.config.coloured, env.first_env, tasks)
        chunk, correlation = config.rollout.action_steps, coloured * self.config.correlation
        self.explorer = ColouredNoise(env.spec, chunk, correlation).to(env.device)
        self.collector = Collector(env, self.explorer, config.seed, chunk=chunk)
        # for each robot: the world model's memory of its episode, and the sum of the accuracies so far
        self.memory = MemoryStateManager(env.num_envs, model.memory_size, device=env.device)
        self.accuracies = torch.zeros(env.num_envs, dtype=torch.float64, device=env.device)
        folder, memory = config.run_folder, model.memory_size
        self.replay = EpisodeReplay(
            config.teacher, folder, config.seed, env, distributed, self._windows, memory, "random", _NOT_RECORDED
        )
        self.learning = False
        self.progress = Progress()

    @classmethod
    def from_config(cls, config: Config, distributed: Distributed) -> "Teacher":
        env = make_training_env(config, distributed)
        model = make_world_model(config.world_model, env.spec, config.rollout.action_steps).to(distributed.device)
        return cls(config, env, model, distributed)

    @property
    def learns_from(self) -> str:
        robots = self.env.num_envs * self.distributed.world_size
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return f"{robots} robots with random actions, a world model of {parameters:,} parameters"

    @property
    def preparing(self) -> str | None:
        return self.model.preparing

    def step(self, fraction: float) -> dict[str, float]:
        started, steps_before = time.perf_counter(), self.collector.env_steps
        self.replay.open()
        self.learning = False
        # a model whose tokenizer alone was trained so far makes no predictions, so it has no accuracy
        learner, predicts = self.learner, self.model.ready
        predicts = predicts and not 0 < learner.began == learner.gradient_steps
        with fail_together(self.distributed):
            accuracy, rewards = self._collect()
        self.learning = True
        collected = time.perf_counter()
        self.replay.batches.refresh()
        if fraction >= 0.5:
            self.model.settle()
        metrics = self.learner.update(self.replay.batches, self.config.gradient_steps, fraction)
        updated = time.perf_counter()
        self.collector.version += 1
        rewards = self.distributed.gather_objects(rewards)
        # processes have equally many robots, but chunks and episodes may end early, so steps are summed
        means = self.distributed.mean({"accuracy": accuracy, "steps": self.collector.env_steps - steps_before})
        self.progress.updates += 1
        self.progress.env_steps += round(means["steps"] * self.distributed.world_size)
        self.progress.episodes += len(rewards)
        metrics |= {"fresh_acc": means["accuracy"]} if predicts else {}
        metrics |= {"episode_reward": sum(rewards) / len(rewards)} if rewards else {}
        return metrics | {"collect_seconds": collected - started, "update_seconds": updated - collected}

    def newest_prediction(self) -> Prediction | None:
        return self.replay.predict_newest(self.model, self.env.spec.control_hz / self.explorer.chunk)

    def state_dict(self) -> dict:
        return {"progress": asdict(self.progress), "learner": self.learner.state_dict()}

    def process_state(self) -> dict:
        own: dict = {"collector": self.collector.state_dict(), "explorer": dict(self.explorer.state_dict())}
        own |= {"memory": self.memory.state_dict(), "predicted": self.accuracies.cpu()}
        return self.replay.state_dict() | own

    def load_state_dict(self, state: dict, process_state: dict) -> list[str]:
        self.progress = Progress(**state["progress"])
        self.learner.load_state_dict(state["learner"])
        lost = self.replay.load_state_dict(process_state)
        self.explorer.load_state_dict(process_state["explorer"])
        self.memory.load_state_dict(process_state["memory"])
        self.accuracies.copy_(process_state["predicted"])
        if self.collector.load_state_dict(process_state["collector"]):
            return lost
        # new seeds for the new episodes, because the old ones were used
        self.collector.seed += self.progress.updates
        return [*lost, "the state of the env cannot be restored; its robots start new episodes"]

    def close(self) -> None:
        """Close the env, end the thread that makes batches and release the store's lock on its folder."""
        self.env.close()
        self.replay.close()

    def _windows(self, store: EpisodeStore, seed: int) -> SequentialWindows | ShuffledWindows:
        if self.config.sequential:
            return SequentialWindows(store, self.bptt_length, self.config.batch_size, seed)
        return ShuffledWindows(store, self.bptt_length, self.config.burn_in)

    def _collect(self) -> tuple[float, list[float]]:
        """Collect; returns the mean accuracy of the predictions, and its sum over each episode that ended.

        The accuracy is that on new data, because predictions are made before the model learns from them.
        """
        accuracies: list[torch.Tensor] = []
        rewards: list[float] = []
        # the first update collects until an episode is complete
        while len(accuracies) < self.decisions or not len(self.replay):
            td = self.collector.decide()
            self.replay.add(td)
            accuracy, ended = self._score(td)
            accuracies.append(accuracy)
            rewards += ended
        return float(torch.stack(accuracies).mean()), rewards

    @torch.no_grad()
    def _score(self, td: TensorDict) -> tuple[torch.Tensor, list[float]]:
        """Returns the mean accuracy of this decision's predictions, and the sums of the episodes that end with it."""
        # a shallow copy, because the recorder keeps `td`
        scored = self.model.score(self.memory.enter(td.clone(False)))
        self.memory.leave(scored["memory"])
        self.accuracies = torch.where(td["is_first"], 0.0, self.accuracies) + scored["accuracy"]
        ended = td["next", "terminated"] | td["next", "truncated"]
        return scored["accuracy"].mean(), self.accuracies[ended].tolist()
