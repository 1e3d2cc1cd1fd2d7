"""The `env` section: one config class per kind of env. Torch-free."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from sparring.config.section import Section


def _known_tasks(names: tuple[str, ...]) -> tuple[str, ...]:
    from sparring.envs.tabletop.tasks.registry import TASKS, find

    if not names:
        raise ValueError(f"expected at least one of: {', '.join(TASKS)}")
    for name in names:
        find(name)
    return names


def _listed(value):
    """ "reach_d0" and ["reach_d0"] are the same."""
    return (value,) if isinstance(value, str) else value


TaskList = Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_known_tasks)]


def _no_camera_twice(cameras: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(cameras)) < len(cameras):
        raise ValueError("names a camera twice")
    return cameras


DOMAINS = ("appearance", "background", "light", "camera_pose", "clutter", "friction")


def _all_domains(names):
    """ "all" is every one of them, and a bare name is a list of one."""
    if names in ("all", ["all"], ("all",)):
        return DOMAINS
    return (names,) if isinstance(names, str) else names


class TabletopConfig(Section):
    """The built-in robot arm on a table."""

    name: str = Field("tabletop", description="which env: tabletop, gym:<gymnasium id>, or your.module:Class")
    task: TaskList = Field(
        ("reach_d0",), description="task and reset distribution; several are dealt out over the envs"
    )
    cameras: Annotated[
        tuple[Literal["head", "wrist", "left_wrist", "right_wrist"], ...],
        BeforeValidator(_listed),
        AfterValidator(_no_camera_twice),
    ] = Field((), description="cameras the policy sees; [] is state only; with two arms left_wrist and right_wrist")
    image_size: int = Field(64, ge=16, le=512, description="pixels a side of each camera image")
    depth: bool = Field(False, description="observation/depth/<camera> beside each image, metres")
    segmentation: bool = Field(False, description="observation/segmentation/<camera>: what each pixel belongs to")
    points: int = Field(0, ge=0, le=8192, description="observation/points: so many points of what the cameras see")
    object_state: Literal["state", "privileged", "hidden"] = Field(
        "state", description="goal and object poses: in observation/state, for critics only, or shown to nobody"
    )
    pad_state: int = Field(
        0, ge=0, le=4096, description="observation/state is padded with zeros to this; 0: not at all"
    )
    pad_action: int = Field(
        0, ge=0, le=256, description="actions have so many entries, the last ignored; 0: no padding"
    )
    control_mode: Literal["delta_qpos", "delta_ee_pos", "delta_ee", "qpos"] = Field(
        "delta_qpos",
        description="what an action means: joint steps, hand steps (pointing down), hand steps and turns, or joints",
    )
    reward: Literal["dense", "sparse"] = Field(
        "dense", description="dense: shaped, in [0, 1] a step; sparse: 1 at the end of a successful episode"
    )
    action_scale: float = Field(1.0, gt=0, le=4, description="multiplies the largest step of an action")
    domain_randomization: Annotated[tuple[Literal[DOMAINS], ...], BeforeValidator(_all_domains)] = Field(  # type: ignore[valid-type]
        (), description=f"what differs between episodes beside the task: all, or a list of {', '.join(DOMAINS)}"
    )
    noise_screen: bool = Field(False, description="the screen of the task explore shows random static, new each step")
    video_renderer: Literal["builtin", "mujoco"] = Field(
        "builtin", description="what draws videos; mujoco is prettier and needs the GL libraries EGL or OSMesa"
    )
    threads: int = Field(
        0, ge=0, le=10_000, description="threads that step and draw a group of robots; 0: one per core in all"
    )


class GymConfig(Section):
    """Any gymnasium env, by its id."""

    name: str = Field(description="gym:<gymnasium id>, e.g. gym:Pendulum-v1, or your.module:Class of a gymnasium.Env")
    vectorize: Literal["serial", "process"] = Field(
        "serial", description="serial: all envs in this process; process: worker processes with shared memory"
    )
    workers: int = Field(
        0, ge=0, le=10_000, description="processes of a group when vectorize=process; 0: one per core in all"
    )
    success_return: float | None = Field(None, description="an episode that returns at least this much is a success")
    kwargs: dict = Field(default_factory=dict, description="passed on to gymnasium.make")
