"""The `env` section: one config class per kind of env. Torch-free."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from sparring.config import Section


def _known_tasks(names: tuple[str, ...]) -> tuple[str, ...]:
    from sparring.envs.tabletop.tasks import TASKS, find

    if not names:
        raise ValueError(f"expected at least one of: {', '.join(TASKS)}")
    for name in names:
        find(name)
    return names


# "reach_d0" and ["reach_d0"] are the same
TaskList = Annotated[
    tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v), AfterValidator(_known_tasks)
]


def _no_camera_twice(cameras: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(cameras)) < len(cameras):
        raise ValueError("names a camera twice")
    return cameras


class TabletopConfig(Section):
    """The built-in robot arm on a table."""

    name: str = Field("tabletop", description="which env: tabletop, gym:<gymnasium id>, or your.module:Class")
    task: TaskList = Field(
        ("reach_d0",), description="task and reset distribution; several are dealt out over the envs"
    )
    cameras: Annotated[tuple[Literal["head", "wrist"], ...], AfterValidator(_no_camera_twice)] = Field(
        (), description="cameras the policy sees; [] is state only"
    )
    image_size: int = Field(64, ge=16, le=512, description="pixels a side of each camera image")
    object_state: bool = Field(True, description="object and goal positions are part of observation/state")
    control_mode: Literal["delta_qpos", "delta_ee_pos", "delta_ee", "qpos"] = Field(
        "delta_qpos",
        description="what an action means: joint steps, hand steps (pointing down), hand steps and turns, or joints",
    )
    reward: Literal["dense", "sparse"] = Field(
        "dense", description="dense: shaped, in [0, 1] a step; sparse: 1 at the end of a successful episode"
    )
    action_scale: float = Field(1.0, gt=0, le=4, description="multiplies the largest step of an action")
    threads: int = Field(0, ge=0, description="threads that step and draw the robots; 0 is one per core")


class GymConfig(Section):
    """Any gymnasium env, by its id."""

    name: str = Field(description="gym:<gymnasium id>, e.g. gym:Pendulum-v1, or your.module:Class of a gymnasium.Env")
    vectorize: Literal["serial", "process"] = Field(
        "serial", description="serial: all envs in this process; process: worker processes with shared memory"
    )
    workers: int = Field(0, ge=0, description="worker processes when vectorize=process; 0 is one per core")
    success_return: float | None = Field(None, description="an episode that returns at least this much is a success")
    kwargs: dict = Field(default_factory=dict, description="passed on to gymnasium.make")
