"""`adversarial`: the world model learns from what the explorer finds, and the explorer seeks what it does not know."""

import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from torch import nn

from sparring.algorithms.world_model import WorldModelLearner
from sparring.config.section import Section
from sparring.data.episodes import EpisodeStore
from sparring.data.recorder import EpisodeRecorder
from sparring.data.windows import MixedWindows, ShuffledWindows
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.phases.configs import AdversarialConfig
from sparring.phases.from_runs import episodes_of, load_part, load_teacher
from sparring.phases.generations import Generations, errors_on
from sparring.phases.phase import Progress
from sparring.phases.replay import Foretold, Replay, foretold
from sparring.phases.student import Student, paid_by
from sparring.processes.distributed import Distributed
from sparring.rewards.reward_model import RewardModel, with_following
from sparring.world_models.world_model import WorldModel

# what is kept of a transition; `judged` is what the world model of the time made of it
_KEPT = ("observation", "action", "is_first", "next", "judged")
_READ = ("action", "is_first", "next/reward", "next/executed", "next/terminated", "next/truncated", "next/success")


class Explorer(Student):
    """A student whose world model goes on learning, and whose episodes are kept."""

    recorder: EpisodeRecorder

    @staticmethod
    def algorithm_config(config) -> Section:
        """With a leash to the policy of phase 2, where there is one."""
        section, leash = config.algorithm_section, config.adversarial.kl_coef
        if config.adversarial.student is None or not leash:
            return section
        if "kl_coef" not in type(section).model_fields:
            raise UserError(
                f"adversarial.kl_coef={leash}, but algorithm={config.algorithm} has no kl_coef to keep the explorer "
                "near the student's policy; give its config one, or set adversarial.kl_coef=0"
            )
        return section.model_copy(update={"kl_coef": leash})

    @staticmethod
    def make_rewards(config, env: Env, distributed: Distributed) -> RewardModel:
        model = load_teacher(config.adversarial.teacher, "adversarial.teacher", config, env)
        return paid_by(model.to(distributed.device).eval(), config, env, distributed)

    def pay(self) -> dict[str, float]:
        # what the env gave: the world model foretells that, not what the explorer is paid
        reward = self.buffer.rollout()["next", "reward"]
        paid = super().pay()
        rollout = with_following(self.buffer).select(*_KEPT).exclude(("next", "value"))
        rollout["next", "reward"] = reward
        # a copy: the recorder keeps it until its episodes end, and the buffer is written to before that
        for transition in rollout.clone().unbind(0):
            self.recorder.add(transition)
        return paid


class Adversarial:
    """An explorer, a store of what it played, and a world model, taking turns.

    An update: the explorer plays and learns; then the world model learns from windows of the teacher's random episodes,
    of all explorers and of the newest. A share of what is played is set aside (generations.py).
    """

    default_limit = ("iterations", 40)
    accuracy = "wm_accuracy"

    def __init__(
        self,
        config: AdversarialConfig,
        explorer: Explorer,
        learner: WorldModelLearner,
        random: EpisodeStore | None,
        folder: Path,
        bptt_length: int,
        seed: int = 0,
    ):
        """`random`: the teacher's episodes; None: not replayed. What is played is kept under `folder`."""
        self.config, self.explorer, self.learner, self.random = config, explorer, learner, random
        self.env, self.distributed = explorer.env, explorer.distributed
        self.folder, self.bptt_length, self.seed = folder, bptt_length, seed
        self.model = nn.ModuleDict({"world_model": learner.model, "policy": explorer.policy})
        self.store: EpisodeStore | None = None
        self.progress = Progress()

    @classmethod
    def from_config(cls, config, distributed: Distributed) -> "Adversarial":
        settings = config.adversarial
        explorer = Explorer.from_config(config, distributed)
        if not explorer.env.spec.max_episode_steps:
            raise UserError("adversarial learns from whole episodes, which have no end; set rollout.max_episode_steps")
        random = None
        if settings.replay_random:
            random = episodes_of(settings.teacher, "adversarial.teacher", explorer.env, distributed.rank)
        if settings.student:
            load_part(explorer.policy, "policy", settings.student, "adversarial.student", config, explorer.env)
        return cls(
            settings,
            explorer,
            WorldModelLearner(settings, explorer.rewards.world_model, distributed),
            random,
            config.run_folder,
            config.training.bptt_length,
            config.seed,
        )

    @property
    def world_model(self) -> WorldModel:
        return self.learner.model

    @property
    def learns_from(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.world_model.parameters())
        return f"{self.explorer.learns_from}, and a world model of {parameters:,} parameters"

    @property
    def learning(self) -> bool:
        """From its explorer's first rollout on: the explorer learns from each of them."""
        return self.explorer.learning

    def step(self, fraction: float) -> dict[str, float]:
        self._open_stores()
        self.explorer.learning = False
        self.generations.begin(self.progress.updates // self.config.generation_every)
        metrics = _means([self._explore(fraction) for _ in range(self.config.explorer_updates_per_iter)])
        metrics |= self._learn(fraction)
        played = self.explorer.progress
        self.progress.updates += 1
        self.progress.env_steps, self.progress.episodes = played.env_steps, played.episodes
        if self.progress.updates % self.config.generation_every == 0:
            metrics |= self._look_back()
        return metrics

    def pictures(self) -> Foretold | None:
        """The newest episode, as the world model foretells it, decision by decision."""
        if not len(self.store):
            return None
        episode = self.store.episode(len(self.store) - 1).to(self.env.device)
        return foretold(self.world_model, episode, self.env.spec.control_hz / self.explorer.collector.chunk)

    def state_dict(self) -> dict:
        return {
            "progress": asdict(self.progress),
            "explorer": self.explorer.state_dict(),
            "learner": self.learner.state_dict(),
        }

    def process_state(self) -> dict:
        self._open_stores()
        return {
            "explorer": self.explorer.process_state(),
            "store": self.store.state_dict(),
            "generations": self.generations.state_dict(),
            "recorder": self.explorer.recorder.state_dict(),
            "replay": self.replay.state_dict(),
        }

    def load_state_dict(self, state: dict, process_state: dict) -> list[str]:
        self.progress = Progress(**state["progress"])
        self.learner.load_state_dict(state["learner"])
        lost = self._open_stores(process_state)
        self.replay.load_state_dict(process_state["replay"])
        self.explorer.recorder.load_state_dict(process_state["recorder"])
        return lost + self.explorer.load_state_dict(state["explorer"], process_state["explorer"])

    def close(self) -> None:
        """End what it has going: the env, the thread that makes batches, the stores' locks on their folders."""
        self.env.close()
        if self.store is not None:
            self.replay.close()
            self.generations.close()
            self.store.close()

    def _explore(self, fraction: float) -> dict[str, float]:
        metrics = self.explorer.collect()
        if self.learner.gradient_steps >= self.config.warmup_steps:
            metrics |= self.explorer.learn(fraction)
        return metrics

    def _learn(self, fraction: float) -> dict[str, float]:
        # processes step together: all of them must have something to learn from
        if self.distributed.max(float(not len(self.store))):
            return {}
        started = time.perf_counter()
        self.replay.refresh()
        metrics = self.learner.update(self.replay, self.config.wm_updates_per_iter, fraction)
        metrics = {_NAMES.get(name, name): value for name, value in metrics.items()}
        return metrics | {"wm_update_seconds": time.perf_counter() - started}

    def _look_back(self) -> dict[str, float]:
        """The world model on what earlier explorers surprised it with, then and now."""
        self.generations.begin(self.progress.updates // self.config.generation_every)
        self.world_model.eval()
        errors = [errors_on(self.world_model, store) for store in self.generations.earlier()]
        # a process may have set nothing aside so far
        sums = {"then": sum(e[0] for e in errors), "now": sum(e[1] for e in errors), "count": float(len(errors))}
        sums = self.distributed.mean(sums)
        count = sums.pop("count")
        return {f"generations_error_{when}": total / count for when, total in sums.items()} if count else {}

    def _open_stores(self, state: dict | None = None) -> list[str]:
        """Not before the first step: a run folder is written to only when all has been found to fit.

        What an earlier run left behind after its last checkpoint is forgotten. Returns what was lost, in words.
        """
        if self.store is not None:
            return []
        lost = []
        # of a process each
        rank = "" if self.distributed.is_main else f"-{self.distributed.rank}"
        self.store = EpisodeStore(self.folder / f"episodes{rank}", max_bytes=int(self.config.max_gb * 1e9))
        self.generations = Generations(self.store, self.folder / f"generations{rank}", self.config.held_out)
        if state and self.store.next_number < state["store"]["next_number"]:
            # a run that branched off from another's checkpoint
            lost.append(f"the episodes played so far are not in {self.store.folder}; plays new ones")
            state = None
        self.store.load_state_dict(state["store"] if state else {"next_number": 0})
        self.generations.load_state_dict(state["generations"] if state else _NO_GENERATION)
        self.explorer.recorder = EpisodeRecorder(
            self.generations, self.env.num_envs, source="explorer", tasks=self.env.tasks
        )
        self.replay = self._replay()
        return lost

    def _replay(self) -> Replay:
        config = self.config
        newest = self.env.num_envs * config.explorer_updates_per_iter
        sources = {
            self._windows(self.store): config.replay_past,
            self._windows(self.store, newest): config.replay_newest,
        }
        if self.random is not None:
            sources[self._windows(self.random)] = config.replay_random
        # each process draws its own
        seed = self.seed * 1009 + self.distributed.rank
        windows = MixedWindows(sources)
        return Replay(windows, config.batch_size, self.world_model.memory_size, seed, self.distributed.device)

    def _windows(self, store: EpisodeStore, newest: int | None = None) -> ShuffledWindows:
        read = [name for name in self.env.spec.observation if name.partition("/")[0] in ("image", "state", "task")]
        keys = [*_READ, *(f"{side}observation/{name}" for side in ("", "next/") for name in read)]
        return ShuffledWindows(store, self.bptt_length, self.config.burn_in, keys=keys, newest=newest)


_NO_GENERATION = {"played": 0, "number": 0, "store": {"next_number": 0}}
# of the world model; what the explorer has too is told apart
_NAMES = {"loss": "wm_loss", "lr": "wm_lr", "grad_norm": "wm_grad_norm"}


def _means(updates: list[dict[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for metrics in updates:
        for name, value in metrics.items():
            values[name].append(value)
    return {name: sum(of) if name.endswith("_seconds") else fmean(of) for name, of in values.items()}
