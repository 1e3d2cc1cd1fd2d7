"""The `teacher`, `student`, `adversarial`, `imitate`, `training`, `evaluation` and `logging` sections. Torch-free."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from sparring.config.section import Section

# "outputs/demos/lift_d0" and ["outputs/demos/lift_d0"] are the same
Names = Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]
Normalization = Literal["mean_std", "min_max", "quantile"]


_Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class TeacherConfig(Section):
    """A world model learns to predict what robots that act at random will see."""

    coloured: float = Field(
        0.5, ge=0, le=1, description="share of the robots whose random actions change slowly; the others' do not"
    )
    correlation: float = Field(
        0.95, ge=0, lt=1, description="of a slow action with the one a step before; 0: none, as of the other robots"
    )
    gradient_steps: int = Field(
        250, gt=0, le=10**6, description="of an update, after rollout.steps decisions of each robot"
    )
    batch_size: int = Field(
        4, gt=0, le=10**6, description="windows of training.bptt_length decisions per gradient step"
    )
    learning_rate: float = Field(3e-3, gt=0, description="at the start; falls to 0 over the run")
    sequential: bool = Field(
        False, description="windows in time order, memory carried along; false: from anywhere, rebuilt by burn_in"
    )
    burn_in: int = Field(
        6, ge=0, le=10_000, description="decisions before a window that rebuild the memory, if not sequential"
    )
    max_gb: float = Field(8.0, gt=0, description="of episodes on disk, on each process; the oldest go beyond that")


class ImitateConfig(Section):
    """Behaviour cloning: learn to do what demonstrators did."""

    demos: Names = Field((), description="folder(s) of demonstrations, as `sparring demos` writes them")
    episodes: int | None = Field(
        None, gt=0, le=10**6, description="use only the first so many of each folder; null: all"
    )
    batch_size: int = Field(256, gt=0, le=10**6, description="demonstrated steps per gradient step, on each process")
    learning_rate: float = Field(1e-3, gt=0, description="at the start")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="how it falls to 0")
    weight_decay: float = Field(1e-4, ge=0, description="how fast weights that nothing asks for shrink (AdamW)")
    steps_per_update: int = Field(
        100, gt=0, le=10**6, description="gradient steps of an update, after which metrics are written"
    )
    normalization: Normalization = Field(
        "min_max", description="what scales the actions, where the policy does; quantile: 1 % to 99 %"
    )
    state_normalization: Normalization = Field("mean_std", description="the same of the state")
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of averaged weights, then what is saved and evaluated, e.g. 0.999; null: off",
    )
    image_augmentation: int = Field(
        0, ge=0, le=512, description="pictures are shifted by up to so many pixels; 0: not at all"
    )


class StudentConfig(Section):
    """An explorer is paid for what the teacher's world model does not know yet."""

    teacher: str | None = Field(None, description="run folder or checkpoint of `sparring train teacher`")
    cameras: Names = Field(("wrist",), description="what the explorer sees; the world model sees all of env.cameras")


class AdversarialConfig(Section):
    """World model and explorer train each other: one learns to foretell what the other finds to surprise it."""

    teacher: str | None = Field(None, description="run folder of `sparring train teacher`, with its episodes")
    student: str | None = Field(
        None, description="run folder or checkpoint of `sparring train student`; null: a new explorer"
    )
    wm_updates_per_iter: int = Field(100, gt=0, le=10**6, description="gradient steps of the world model in an update")
    explorer_updates_per_iter: int = Field(
        1, gt=0, le=10**6, description="rollouts in an update, and updates of the explorer, one from each"
    )
    warmup_steps: int = Field(
        200,
        ge=0,
        le=10**9,
        description="first gradient steps, in which the world model alone learns while the explorer acts",
    )
    learning_rate: float = Field(
        1e-3, gt=0, description="of the world model, at the start; falls to 0 over the run; explorer: ppo.policy_lr"
    )
    batch_size: int = Field(
        4, gt=0, le=10**6, description="windows of training.bptt_length decisions per gradient step"
    )
    burn_in: int = Field(6, ge=0, le=10_000, description="decisions before a window that rebuild the memory")
    replay_random: float = Field(0.4, ge=0, description="weight of the teacher's episodes among the windows")
    replay_past: float = Field(0.3, ge=0, description="weight of the episodes of all explorers of this run")
    replay_newest: float = Field(0.3, ge=0, description="weight of the newest episodes, one of each robot")
    kl_coef: float = Field(0.02, ge=0, description="weight of the KL to the student's policy; 0: no leash")
    generation_every: int = Field(10, gt=0, le=10**9, description="updates of a generation of explorers")
    held_out: float = Field(0.125, ge=0, lt=1, description="share of the episodes that is never trained on")
    max_gb: float = Field(8.0, gt=0, description="of episodes on disk, on each process; the oldest go beyond that")


class TrainingConfig(Section):
    """How long a run lasts and how often it speaks. Training ends at the first limit that is reached."""

    total_timesteps: int | None = Field(
        None,
        gt=0,
        le=10**15,
        description="env steps over all robots and processes; null: 150000 (finetune) or 192000 (student) if nothing "
        "else limits the run",
    )
    num_episodes: int | None = Field(
        None, gt=0, le=10**12, description="episodes over all robots and processes; null: no limit"
    )
    iterations: int | None = Field(
        None,
        gt=0,
        le=10**9,
        description="updates; null: imitate 20, teacher 24, adversarial 40 if nothing else limits the run",
    )
    bptt_length: int = Field(
        8,
        gt=0,
        le=10_000,
        description="decisions that a world model's gradients pass through at once, back through its memory",
    )
    save_every: int = Field(
        50, gt=0, le=10**9, description="updates between checkpoints; the last state is always saved"
    )
    keep_checkpoints: int = Field(2, gt=0, le=10**6, description="newest checkpoints that are kept")
    log_every: int = Field(1, gt=0, le=10**9, description="updates between lines of metrics")


class EvaluationConfig(Section):
    """Held-out episodes, with their own seeds."""

    episodes: int = Field(100, gt=0, le=10**6, description="episodes of an evaluation, exactly")
    every: int = Field(0, ge=0, le=10**9, description="updates between evaluations during training; 0: only at the end")
    baseline: bool = Field(True, description="evaluate random actions on the same seeds beside the policy")


class LoggingConfig(Section):
    """What is said where."""

    console_level: _Level = Field("INFO", description="least important message shown on the console")
    file_level: _Level = Field("DEBUG", description="least important message kept in the run folder's logs")
    enable_file_logging: bool = Field(True, description="keep logs in the run folder")
    tensorboard: bool = Field(False, description="numbers for TensorBoard too; extra `tensorboard`")
    mode: Literal["online", "offline", "disabled"] = Field(
        "disabled", description="Weights & Biases, extra `wandb`; offline: kept for `wandb sync`"
    )
    project: str = Field("sparring", min_length=1, description="project in Weights & Biases")
    name: str | None = Field(None, description="name of the run in Weights & Biases; null: its folder's")
    video_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of a run's time that making videos may take; evaluations are filmed anyway; 1: no limit",
    )
    rerun: bool = Field(False, description="also keep what is filmed as recording.rrd, for the Rerun viewer")
