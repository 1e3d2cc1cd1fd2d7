"""`student`: an explorer with fewer cameras than the world model is paid for what the world model does not know yet."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from sparring.checkpoint import SAME_MEANING, checkpoint_folder, load_spec, load_weights, spec_differences
from sparring.collect.episodes import Episode
from sparring.config_text import flatten, read_settings
from sparring.distributed import Distributed
from sparring.envs.backend import EnvSpec
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.phases.finetune import Finetune
from sparring.rewards.reward_model import RewardModel
from sparring.world_models.make import make_world_model
from sparring.world_models.world_model import WorldModel


class Student(Finetune):
    """Task RL in all but two things: what pays, and what the policy is shown."""

    default_limit = ("total_timesteps", 100_000)

    @staticmethod
    def seen(config, spec: EnvSpec) -> EnvSpec:
        return with_cameras(spec, config.student.cameras)

    @staticmethod
    def make_rewards(config, env: Env, distributed: Distributed) -> RewardModel:
        teacher = load_teacher(config, env).to(distributed.device)
        unseen = tuple(camera for camera in teacher.cameras if camera not in config.student.cameras)
        return RewardModel(config.rewards, teacher, env, config.rollout.action_steps, unseen, distributed)

    @property
    def learns_from(self) -> str:
        return f"{super().learns_from}, paid for {', '.join(self.rewards.terms)}"

    def episode_metrics(self, episodes: list[Episode]) -> dict[str, float]:
        metrics = super().episode_metrics(episodes)
        return metrics | ({"contact_share": fmean(e.contact for e in episodes)} if episodes else {})


def with_cameras(spec: EnvSpec, cameras: tuple[str, ...]) -> EnvSpec:
    """The same env to somebody who has these cameras only."""
    shown = [name.partition("/")[2] for name in spec.observation if name.startswith("image/")]
    if not set(cameras) <= set(shown):
        raise UserError(
            f"student.cameras={list(cameras)}, but the env shows {', '.join(shown) or 'no camera'}; "
            f"set env.cameras to all that the world model predicts, e.g. [head,{','.join(cameras)}]"
        )
    kept = {name: kind for name, kind in spec.observation.items() if name.partition("/")[2] in ("", *cameras)}
    # of all cameras together
    kept.pop("points", None)
    return replace(spec, observation=kept)


def load_teacher(config, env: Env) -> WorldModel:
    """The world model of `student.teacher`, frozen: its config, its weights, and an env like the one it learned in."""
    folder = checkpoint_folder(config.student.teacher)
    differences = _differences(folder, config, env)
    if differences:
        raise UserError(
            "\n".join(
                [f"student.teacher={config.student.teacher}: that world model does not fit this run:", *differences]
                + ["leave out what you gave (the rest comes with the teacher), or train another teacher"]
            )
        )
    teacher = make_world_model(config.world_model, env.spec, config.rollout.action_steps)
    load_weights(teacher, folder)
    return teacher.requires_grad_(False).eval()


def _differences(folder: Path, config, env: Env) -> list[str]:
    """In words: between the run that trained the teacher and this one."""
    trained = {setting.key: setting.value for setting in read_settings(folder / "config.yaml")}
    if trained["phase"] != "teacher":
        return [f"it was made by `sparring train {trained['phase']}`; world models come of `sparring train teacher`"]
    now = {f"world_model.{key}": value for key, value in flatten(config.world_model.model_dump(mode="json")).items()}
    now["rollout.action_steps"] = config.rollout.action_steps
    now |= {f"env.{key}": getattr(env.config, key) for key in SAME_MEANING if hasattr(env.config, key)}
    found = [f"{key} was {trained.get(key)} and is {value}" for key, value in now.items() if trained.get(key) != value]
    return found + spec_differences(_foreseen(load_spec(folder)), _foreseen(env.spec))


def _foreseen(spec: EnvSpec) -> EnvSpec:
    """What a world model reads; what is measured beside it may differ."""
    read = {name: kind for name, kind in spec.observation.items() if name.partition("/")[0] in ("image", "state")}
    return replace(spec, observation=read)
