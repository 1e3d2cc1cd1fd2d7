"""`student`: an explorer is rewarded for a world model's errors and uncertainty. It has fewer cameras."""

from dataclasses import replace
from statistics import fmean
from typing import Any, Literal, cast

import torch

from sparring.collect.camera import Episode
from sparring.config.schema import Config
from sparring.contract import EnvSpec
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.phases.build import load_teacher
from sparring.phases.finetune import Finetune
from sparring.phases.replay import NewestEpisode, Prediction
from sparring.processes.distributed import Distributed
from sparring.rewards.reward_model import RewardModel, with_following
from sparring.world_models.world_model import WorldModel


class Student(Finetune):
    """Fine-tuning with two differences: the rewards, and the policy's cameras."""

    # 60 updates: with a frozen world model, later explorers touch objects less often (docs/log.md)
    default_limit = ("total_timesteps", 192_000)
    # accuracy of the world model on the explorer's new data
    accuracy = "wm_accuracy"
    rewards: RewardModel

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        # an episode of the first robot, with the env's rewards and all cameras of the world model
        self.newest = NewestEpisode()

    @staticmethod
    def policy_spec(config: Config, spec: EnvSpec) -> EnvSpec:
        return with_cameras(spec, config.student.cameras)

    @classmethod
    def build_rewards(cls, config: Config, env: Env, distributed: Distributed) -> RewardModel:
        teacher = load_teacher(cast(str, config.student.teacher), "student.teacher", config, env)
        return cls.rewards_by(teacher.to(distributed.device).requires_grad_(False).eval(), config, env, distributed)

    @staticmethod
    def rewards_by(world_model: WorldModel, config: Config, env: Env, distributed: Distributed) -> RewardModel:
        unseen = tuple(camera for camera in world_model.cameras if camera not in config.student.cameras)
        return RewardModel(config.rewards, world_model, env, config.rollout.action_steps, unseen, distributed)

    @property
    def evaluation(self) -> Literal["policy", "exploration"]:
        # exploration is measured in the state, which has the positions of hands
        return "exploration" if "state" in self.env.spec.observation else "policy"

    @property
    def learns_from(self) -> str:
        return f"{super().learns_from}, with rewards {', '.join(self.rewards.terms)}"

    def collect(self) -> dict[str, float]:
        seconds = super().collect()
        played = with_following(self.buffer, robots=1)[:, 0]
        valid = played.get("valid", torch.ones_like(played["is_first"]))
        # indexing by a mask makes a copy: the next rollout overwrites this memory
        self.newest.add(played[valid].select("observation", "action", "is_first", "next"))
        return seconds

    def newest_prediction(self) -> Prediction | None:
        if self.newest.complete is None:
            return None
        rate = self.env.spec.control_hz / self.collector.chunk
        return Prediction.of(self.rewards.world_model, self.newest.complete, rate)

    def episode_metrics(self, episodes: list[Episode]) -> dict[str, float]:
        metrics = super().episode_metrics(episodes)
        return metrics | ({"contact_share": fmean(e.contact for e in episodes)} if episodes else {})


def with_cameras(spec: EnvSpec, cameras: tuple[str, ...]) -> EnvSpec:
    """Returns the spec with these cameras only."""
    known = [name.partition("/")[2] for name in spec.observation if name.startswith("image/")]
    if not set(cameras) <= set(known):
        choose = f"set student.cameras to some of {', '.join(known)}" if known else "an explorer needs image/<name>"
        raise UserError(
            f"student.cameras={list(cameras)}, but the env has {', '.join(known) or 'no camera'}; {choose}, or "
            f"(env.name=tabletop) set env.cameras to all cameras of the world model, e.g. [head,{','.join(cameras)}]"
        )
    kept = {name: kind for name, kind in spec.observation.items() if name.partition("/")[2] in ("", *cameras)}
    # points come from all cameras together
    kept.pop("points", None)
    return replace(spec, observation=kept)
