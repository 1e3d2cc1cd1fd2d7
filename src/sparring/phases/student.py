"""`student`: an explorer with fewer cameras than the world model is paid for what the world model does not know yet."""

from dataclasses import replace
from statistics import fmean
from typing import Literal, cast

from sparring.collect.camera import Episode
from sparring.config.schema import Config
from sparring.contract import EnvSpec
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.phases.build import load_teacher
from sparring.phases.finetune import Finetune
from sparring.processes.distributed import Distributed
from sparring.rewards.reward_model import RewardModel
from sparring.world_models.world_model import WorldModel


class Student(Finetune):
    """Task RL in all but two things: the rewards, and what the policy sees."""

    # 60 updates: later ones drift away from things, while the world model stays as it is (docs/log.md)
    default_limit = ("total_timesteps", 192_000)
    # of the world model, on what the explorer has just found
    accuracy = "wm_accuracy"

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
        # the state says where hands are
        return "exploration" if "state" in self.env.spec.observation else "policy"

    @property
    def learns_from(self) -> str:
        return f"{super().learns_from}, paid for {', '.join(self.rewards.terms)}"

    def episode_metrics(self, episodes: list[Episode]) -> dict[str, float]:
        metrics = super().episode_metrics(episodes)
        return metrics | ({"contact_share": fmean(e.contact for e in episodes)} if episodes else {})


def with_cameras(spec: EnvSpec, cameras: tuple[str, ...]) -> EnvSpec:
    """The same env, seen by these cameras only."""
    shown = [name.partition("/")[2] for name in spec.observation if name.startswith("image/")]
    if not set(cameras) <= set(shown):
        raise UserError(
            f"student.cameras={list(cameras)}, but the env shows {', '.join(shown) or 'no camera'}; "
            f"set env.cameras to all that the world model predicts, e.g. [head,{','.join(cameras)}]"
        )
    kept = {name: kind for name, kind in spec.observation.items() if name.partition("/")[2] in ("", *cameras)}
    # points are of all cameras together
    kept.pop("points", None)
    return replace(spec, observation=kept)
