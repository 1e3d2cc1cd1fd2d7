"""The `env` section: one config class per kind of env. Torch-free."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from sparring.config.section import Section


def _known_tasks(names: tuple[str, ...]) -> tuple[str, ...]:
    from sparring.envs.tabletop.tasks.registry import TASKS, find

    if not names:
        raise ValueError(f"expected at least one of: {', '.join(TASKS)}")
    for name in names:
        find(name)
    return names


def _listed(value):
    """Accept "reach_d0" for ["reach_d0"]."""
    return (value,) if isinstance(value, str) else value


TaskList = Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_known_tasks)]


def _no_camera_twice(cameras: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(cameras)) < len(cameras):
        raise ValueError("expected each camera once")
    return cameras


DOMAINS = ("appearance", "background", "light", "camera_pose", "clutter", "friction")


def _all_domains(names):
    """Replace "all" by all domains, and accept a name for a list of one."""
    if names in ("all", ["all"], ("all",)):
        return DOMAINS
    return (names,) if isinstance(names, str) else names


class TabletopConfig(Section):
    """The built-in robot arm on a table."""

    name: str = Field("tabletop", description="kind of env: tabletop, gym:<gymnasium id>, or your.module:Class")
    task: TaskList = Field(
        ("reach_d0",), description="task and start distribution; the robots take the entries of a list in turn"
    )
    cameras: Annotated[
        tuple[Literal["head", "wrist", "left_wrist", "right_wrist"], ...],
        BeforeValidator(_listed),
        AfterValidator(_no_camera_twice),
    ] = Field((), description="cameras of the policy; []: state only; two arms have left_wrist and right_wrist")
    image_size: int = Field(64, ge=16, le=512, description="side of each camera image, pixels")
    depth: bool = Field(False, description="add observation/depth/<camera>, metres")
    segmentation: bool = Field(False, description="add observation/segmentation/<camera>, a label for each pixel")
    points: int = Field(0, ge=0, le=8192, description="points in observation/points, a point cloud of all cameras")
    object_state: Literal["state", "privileged", "hidden"] = Field(
        "state", description="goal and object poses: in observation/state, for critics only, or in no observation"
    )
    pad_state: int = Field(
        0, ge=0, le=4096, description="observation/state is padded with zeros to this size; 0: no padding"
    )
    pad_action: int = Field(
        0, ge=0, le=256, description="number of entries of an action; the env ignores extra ones; 0: no padding"
    )
    control_mode: Literal["delta_qpos", "delta_ee_pos", "delta_ee", "qpos"] = Field(
        "delta_qpos",
        description="delta_qpos: joint displacements; delta_ee_pos: end-effector displacement, gripper pointing down; "
        "delta_ee: end-effector displacement and rotation; qpos: joint targets",
    )
    reward: Literal["dense", "sparse"] = Field(
        "dense", description="dense: shaped, in [0, 1] per step; sparse: 1 at the end of a successful episode"
    )
    action_scale: float = Field(1.0, gt=0, le=4, description="multiplies the largest step of an action")
    domain_randomization: Annotated[tuple[Literal[DOMAINS], ...], BeforeValidator(_all_domains)] = Field(  # type: ignore[valid-type]
        (), description=f"properties that are randomized in each episode: all, or a list of {', '.join(DOMAINS)}"
    )
    noise_screen: bool = Field(False, description="the screen of the task explore shows new random noise at each step")
    video_renderer: Literal["builtin", "mujoco"] = Field(
        "builtin", description="renderer of videos; mujoco is more realistic and needs the GL library EGL or OSMesa"
    )
    threads: int = Field(0, ge=0, description="simulation and rendering threads of a robot group; 0: cores / groups")


Corner = tuple[float, float, float]
Pixels = Annotated[int, Field(ge=8, le=4096)]


class DatasetConfig(Section):
    """No env: observations and actions are those of imitate.demos; only `imitate` works without a simulator."""

    name: str = Field("dataset", description="dataset")
    image_size: tuple[Pixels, Pixels] | Pixels | None = Field(
        None, description="size to which images are scaled, pixels: a side or [height, width]; null: as recorded"
    )
    action_low: tuple[float, ...] = Field(
        (),
        description="actions that the policy's -1 stands for; []: -1 for an entry in [-1, 1], else its minimum",
    )
    action_high: tuple[float, ...] = Field(
        (),
        description="actions that the policy's 1 stands for; []: 1 for an entry in [-1, 1], else its maximum",
    )


class GymConfig(Section):
    """A gymnasium env, by its id."""

    name: str = Field(description="gym:<gymnasium id>, metaworld:<task>, or your.module:Class of a gymnasium.Env")
    vectorize: Literal["serial", "process", "gpu"] = Field(
        "serial",
        description="serial: all envs in this process; process: worker processes with shared memory; gpu: ManiSkill's "
        "GPU simulator",
    )
    workers: int = Field(0, ge=0, description="processes of each group if vectorize=process; 0: one per core in total")
    restarts: int = Field(
        3, ge=0, description="number of times that a worker that dies is restarted; its episodes are truncated"
    )
    success_return: float | None = Field(None, description="an episode is a success if its return is at least this")
    kwargs: dict = Field(default_factory=dict, description="keyword arguments for gymnasium.make")
    roles: dict[str, str] = Field(
        default_factory=dict,
        description="what an observation is for: image/NAME, depth/NAME, points, state, instruction or ignore; "
        "others are inferred",
    )
    points: int = Field(
        0, ge=0, le=8192, description="points in observation/points, of all cameras with depth; 0: none"
    )
    points_low: Corner | None = Field(None, description="points are cropped to a box of the world: its lowest x, y, z")
    points_high: Corner | None = Field(None, description="highest x, y, z of the box, metres; null: no limits")
    points_frame: Literal["world", "gripper"] = Field(
        "world", description="frame of the points; gripper: position and rotation of the gripper, from the env"
    )

    @field_validator("points_high")
    @classmethod
    def _above_low(cls, high: Corner | None, info: ValidationInfo) -> Corner | None:
        low = info.data.get("points_low")
        if low and high and not all(least < most for least, most in zip(low, high, strict=True)):
            raise ValueError(f"expected more than points_low={list(low)} in x, y and z")
        return high
