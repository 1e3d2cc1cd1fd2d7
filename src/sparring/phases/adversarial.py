"""`adversarial`: the world model learns from the explorer's episodes; the explorer is rewarded for its errors."""

import time
from collections import defaultdict
from dataclasses import asdict
from statistics import fmean
from typing import cast

from torch import nn

from sparring.algorithms.world_model import WorldModelLearner
from sparring.config.schema import Config
from sparring.config.section import Section
from sparring.data.episodes import EpisodeStore
from sparring.data.windows import MixedWindows, ShuffledWindows
from sparring.errors import UserError
from sparring.phases.build import load_teacher, open_episodes
from sparring.phases.phase import Phase, Progress
from sparring.phases.replay import EpisodeReplay, Prediction
from sparring.phases.student import Student
from sparring.processes.distributed import Distributed
from sparring.rewards.reward_model import with_following
from sparring.runs.fits import load_part
from sparring.world_models.world_model import WorldModel

# recorded keys of a transition; `judged`: its scores by the world model at that time
_RECORDED = ("observation", "action", "is_first", "next", "judged")
_READ = ("action", "is_first", "next/reward", "next/executed", "next/terminated", "next/truncated", "next/success")
# metrics of the world model whose names the explorer uses as well
_NAMES = {"loss": "wm_loss", "lr": "wm_lr", "grad_norm": "wm_grad_norm", "steps_skipped": "wm_steps_skipped"}


class _Explorer(Student):
    """A student whose world model continues to learn, and whose episodes are recorded."""

    replay: EpisodeReplay

    @staticmethod
    def algorithm_config(config: Config) -> Section:
        """The algorithm's section, with a KL penalty to the student's policy if there is one."""
        section, kl_coef = config.algorithm_section, config.adversarial.kl_coef
        if config.adversarial.student is None or not kl_coef:
            return section
        if "kl_coef" not in type(section).model_fields:
            raise UserError(
                f"adversarial.kl_coef={kl_coef} needs an algorithm with kl_coef, which keeps the explorer near the "
                f"student's policy; add it to the config of algorithm={config.algorithm}, or set adversarial.kl_coef=0"
            )
        return section.model_copy(update={"kl_coef": kl_coef})

    def add_rewards(self) -> dict[str, float]:
        # record the env's rewards: the world model predicts them, not the intrinsic ones
        reward = self.buffer.rollout()["next", "reward"]
        metrics = super().add_rewards()
        rollout = with_following(self.buffer).select(*_RECORDED).exclude(("next", "value"))
        rollout["next", "reward"] = reward
        # a copy: the recorder keeps it until its episodes end, and the buffer is overwritten before that
        for transition in rollout.clone().unbind(0):
            self.replay.add(transition)
        return metrics


class Adversarial(Phase):
    """Alternates between an explorer and a world model, with a store of the explorer's episodes.

    An update: the explorer collects and learns; then the world model learns from windows of the teacher's random
    episodes, of all explorers' and of the newest episodes. A share of the episodes is held out (`Generations`).
    """

    default_limit = ("iterations", 40)
    accuracy = "wm_accuracy"
    # `sparring eval` evaluates the policy
    evaluation = "world_model"

    def __init__(self, config: Config, explorer: _Explorer, world_model: WorldModel, random: EpisodeStore | None):
        """`random`: the teacher's episodes; None: they are not replayed."""
        self.config, self.bptt_length = config.adversarial, config.training.bptt_length
        self.explorer, self.world_model, self.random = explorer, world_model, random
        self.env, self.distributed = env, distributed = explorer.env, explorer.distributed
        self.model = nn.ModuleDict({"world_model": world_model, "policy": explorer.policy})
        self.learner = WorldModelLearner(
            self.config, world_model, distributed, "adversarial", config.training.skip_nonfinite_steps
        )
        folder, memory, held_out = config.run_folder, world_model.memory_size, self.config.held_out
        self.replay = explorer.replay = EpisodeReplay(
            self.config, folder, config.seed, env, distributed, self._windows, memory, "explorer", held_out=held_out
        )
        self.progress = Progress()

    @classmethod
    def from_config(cls, config: Config, distributed: Distributed) -> "Adversarial":
        settings, key = config.adversarial, "adversarial.teacher"
        teacher = cast(str, settings.teacher)
        env, policy, algorithm = _Explorer.build_learner(config, distributed)
        world_model = load_teacher(teacher, key, config, env).to(distributed.device).eval()
        rewards = _Explorer.rewards_by(world_model, config, env, distributed)
        explorer = _Explorer.of(config, env, policy, algorithm, distributed, rewards)
        if not env.spec.max_episode_steps:
            raise UserError("adversarial needs complete episodes, but there is no limit; set rollout.max_episode_steps")
        random = open_episodes(teacher, key, env, distributed.rank) if settings.replay_random else None
        if settings.student:
            load_part(policy, "policy", settings.student, "adversarial.student", config, env)
        return cls(config, explorer, world_model, random)

    @property
    def evaluated_model(self) -> WorldModel:
        return self.world_model

    @property
    def preparing(self) -> str | None:
        return self.world_model.preparing

    @property
    def learns_from(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.world_model.parameters())
        return f"{self.explorer.learns_from}, and a world model of {parameters:,} parameters"

    @property
    def learning(self) -> bool:
        """True from the explorer's first rollout of this step on: the explorer learns from each of them."""
        return self.explorer.learning

    def step(self, fraction: float) -> dict[str, float]:
        self.replay.open()
        self.explorer.learning = False
        self.replay.generations.begin(self.progress.updates // self.config.generation_every)
        learns = self.learner.gradient_steps >= self.config.warmup_steps
        rollouts = range(self.config.explorer_updates_per_iter)
        metrics = _means([self.explorer.collect_and_learn(fraction, learns) for _ in rollouts])
        metrics |= self._learn(fraction)
        explorer = self.explorer.progress
        self.progress.updates += 1
        self.progress.env_steps, self.progress.episodes = explorer.env_steps, explorer.episodes
        if self.progress.updates % self.config.generation_every == 0:
            metrics |= self._errors_on_generations()
        return metrics

    def newest_prediction(self) -> Prediction | None:
        rate = self.env.spec.control_hz / self.explorer.collector.chunk
        return self.replay.predict_newest(self.world_model, rate)

    def state_dict(self) -> dict:
        state = {"progress": asdict(self.progress), "explorer": self.explorer.state_dict()}
        return state | {"learner": self.learner.state_dict()}

    def process_state(self) -> dict:
        return self.replay.state_dict() | {"explorer": self.explorer.process_state()}

    def load_state_dict(self, state: dict, process_state: dict) -> list[str]:
        self.progress = Progress(**state["progress"])
        self.learner.load_state_dict(state["learner"])
        lost = self.replay.load_state_dict(process_state)
        return lost + self.explorer.load_state_dict(state["explorer"], process_state["explorer"])

    def close(self) -> None:
        """Close the env, end the thread that makes batches and release the locks on folders."""
        self.env.close()
        self.replay.close()

    def _learn(self, fraction: float) -> dict[str, float]:
        # processes take gradient steps together, so each of them needs an episode
        if self.distributed.max(float(not len(self.replay))):
            return {}
        started = time.perf_counter()
        self.replay.batches.refresh()
        metrics = self.learner.update(self.replay.batches, self.config.wm_updates_per_iter, fraction)
        metrics = {_NAMES.get(name, name): value for name, value in metrics.items()}
        return metrics | {"wm_update_seconds": time.perf_counter() - started}

    def _errors_on_generations(self) -> dict[str, float]:
        """Errors of the world model on held-out episodes of earlier explorers: at recording time, and now."""
        generations = self.replay.generations
        generations.begin(self.progress.updates // self.config.generation_every)
        self.world_model.eval()
        errors = [generations.errors(self.world_model, store) for store in generations.earlier()]
        # a process may not have held out any episode yet
        sums = {"then": sum(e[0] for e in errors), "now": sum(e[1] for e in errors), "count": float(len(errors))}
        sums = self.distributed.mean(sums)
        count = sums.pop("count")
        return {f"generations_error_{when}": total / count for when, total in sums.items()} if count else {}

    def _windows(self, store: EpisodeStore, seed: int) -> MixedWindows:
        config = self.config
        inputs = [name for name in self.env.spec.observation if name.partition("/")[0] in ("image", "state", "task")]
        keys = [*_READ, *(f"{side}observation/{name}" for side in ("", "next/") for name in inputs)]

        def windows(store: EpisodeStore, newest: int | None = None) -> ShuffledWindows:
            return ShuffledWindows(store, self.bptt_length, config.burn_in, keys=keys, newest=newest)

        newest = self.env.num_envs * config.explorer_updates_per_iter
        sources = {windows(store): config.replay_past, windows(store, newest): config.replay_newest}
        if self.random is not None:
            sources[windows(self.random)] = config.replay_random
        return MixedWindows(sources)


def _means(updates: list[dict[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for metrics in updates:
        for name, value in metrics.items():
            values[name].append(value)
    return {name: (sum if name.endswith("_seconds") else fmean)(each) for name, each in values.items()}
