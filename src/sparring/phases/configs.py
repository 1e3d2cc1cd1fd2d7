"""Sections `teacher`, `student`, `adversarial`, `imitate`, `training`, `evaluation`, `logging`. Imports no torch."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from sparring.config.section import Section

# one name may be given without a list: "outputs/demos/lift_d0" means ["outputs/demos/lift_d0"]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]


Normalization = Literal["mean_std", "min_max", "quantile"]


_Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class TeacherConfig(Section):
    """A world model learns to predict the frames of robots with random actions."""

    coloured: float = Field(
        0.5, ge=0, le=1, description="share of robots with correlated random actions; the others' are uncorrelated"
    )
    correlation: float = Field(
        0.95, ge=0, lt=1, description="correlation of successive actions of these robots; 0: uncorrelated"
    )
    gradient_steps: int = Field(
        250, gt=0, description="gradient steps of an update, after rollout.steps decisions per robot"
    )
    batch_size: int = Field(4, gt=0, description="windows of training.bptt_length decisions per gradient step")
    learning_rate: float = Field(3e-3, gt=0, description="initial learning rate; decays to 0 over the run")
    sequential: bool = Field(
        False, description="windows in time order with carried memory; false: random windows, memory from burn_in"
    )
    burn_in: int = Field(6, ge=0, description="decisions before a window that fill the memory, if not sequential")
    max_gb: float = Field(8.0, gt=0, description="limit of episodes on disk per process, in GB; the oldest are removed")


class ImitateConfig(Section):
    """Behaviour cloning: the policy learns to reproduce demonstrated actions."""

    demos: Names = Field((), description="folder(s) of demonstrations, e.g. from `sparring demos`")
    keys: dict[str, str] = Field(
        default_factory=dict,
        description="what a key of the demonstrations is for: image/NAME, state, points, privileged, instruction, "
        "action or ignore; others are inferred",
    )
    fps: Literal["same", "resample", "ignore"] = Field(
        "same",
        description="steps per second of the demonstrations: same as the env's; resample: for absolute actions; "
        "ignore: a demonstrated step is an env step",
    )
    held_out: float = Field(
        0.1, gt=0, lt=1, description="share of the episodes for evaluation if env.name=dataset and they have no split"
    )
    episodes: int | None = Field(None, gt=0, description="number of episodes used from each folder; null: all")
    batch_size: int = Field(256, gt=0, description="demonstrated steps per gradient step and process")
    learning_rate: float = Field(1e-3, gt=0, description="initial learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="decay of the learning rate")
    weight_decay: float = Field(1e-4, ge=0, description="weight decay of AdamW")
    steps_per_update: int = Field(100, gt=0, description="gradient steps of an update, after which metrics are written")
    normalization: Normalization = Field(
        "min_max", description="scaling of actions, if the policy scales them; quantile: 1 % to 99 %"
    )
    state_normalization: Normalization = Field("mean_std", description="scaling of the state")
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of averaged weights, which are saved and evaluated, e.g. 0.999; null: off",
    )
    image_augmentation: int = Field(0, ge=0, description="maximum random shift of images in pixels; 0: off")


class StudentConfig(Section):
    """An explorer learns from intrinsic rewards, computed from the predictions of the teacher's frozen world model."""

    teacher: str | None = Field(None, description="run folder or checkpoint of `sparring train teacher`")
    cameras: Names = Field(("wrist",), description="cameras of the explorer; the world model uses all of env.cameras")


class AdversarialConfig(Section):
    """In turns, a world model learns from an explorer's episodes, and the explorer from the world model's rewards."""

    teacher: str | None = Field(None, description="run folder of `sparring train teacher`, with its episodes")
    student: str | None = Field(
        None, description="run folder or checkpoint of `sparring train student`; null: a new explorer"
    )
    wm_updates_per_iter: int = Field(100, gt=0, description="gradient steps of the world model per update")
    explorer_updates_per_iter: int = Field(
        1, gt=0, description="rollouts per update; the explorer is updated after each of them"
    )
    warmup_steps: int = Field(
        200, ge=0, description="gradient steps of the world model before the explorer starts to learn"
    )
    learning_rate: float = Field(
        1e-3, gt=0, description="initial learning rate of the world model; decays to 0; explorer: ppo.policy_lr"
    )
    batch_size: int = Field(4, gt=0, description="windows of training.bptt_length decisions per gradient step")
    burn_in: int = Field(6, ge=0, description="decisions before a window that fill the memory")
    replay_random: float = Field(0.4, ge=0, description="weight of the teacher's episodes in the sampling of windows")
    replay_past: float = Field(0.3, ge=0, description="weight of all episodes that the explorer has collected")
    replay_newest: float = Field(0.3, ge=0, description="weight of the newest episodes, one per robot and rollout")
    kl_coef: float = Field(0.02, ge=0, description="weight of the KL divergence from the student's policy; 0: none")
    generation_every: int = Field(10, gt=0, description="number of updates whose held-out episodes form one generation")
    held_out: float = Field(0.125, ge=0, lt=1, description="share of episodes that are never trained on")
    max_gb: float = Field(8.0, gt=0, description="limit of episodes on disk per process, in GB; the oldest are removed")


class TrainingConfig(Section):
    """Length of a run, and intervals of checkpoints and metrics. Training ends at the first limit that is reached."""

    total_timesteps: int | None = Field(
        None,
        gt=0,
        description="limit of env steps over all robots and processes; null: 150000 (finetune) or 192000 (student) if "
        "no other limit is set",
    )
    num_episodes: int | None = Field(
        None, gt=0, description="limit of episodes over all robots and processes; null: none"
    )
    iterations: int | None = Field(
        None, gt=0, description="limit of updates; null: imitate 20, teacher 24, adversarial 40 if no other is set"
    )
    bptt_length: int = Field(
        8, gt=0, description="decisions through which a world model's gradients are backpropagated"
    )
    save_every: int = Field(50, gt=0, description="updates between checkpoints; the last state is always saved")
    keep_checkpoints: int = Field(2, gt=0, description="number of checkpoints to keep; older ones are removed")
    log_every: int = Field(1, gt=0, description="updates between rows of metrics")
    skip_nonfinite_steps: int = Field(
        0, ge=0, description="gradient steps per update that may be skipped if NaN or infinite; one more ends training"
    )


class EvaluationConfig(Section):
    """Held-out episodes, with seeds that training never uses."""

    episodes: int = Field(100, gt=0, description="exact number of episodes of an evaluation")
    every: int = Field(0, ge=0, description="updates between evaluations during training; 0: only at the end")
    baseline: bool = Field(True, description="also evaluate random actions on the same seeds")


class LoggingConfig(Section):
    """Destinations and levels of messages, metrics and videos."""

    console_level: _Level = Field("INFO", description="lowest level of messages on the console")
    file_level: _Level = Field("DEBUG", description="lowest level of messages in the run folder's logs")
    enable_file_logging: bool = Field(True, description="write logs to the run folder")
    tensorboard: bool = Field(False, description="write metrics for TensorBoard as well; needs extra `tensorboard`")
    mode: Literal["online", "offline", "disabled"] = Field(
        "disabled", description="Weights & Biases, needs extra `wandb`; offline: files for `wandb sync`"
    )
    project: str = Field("sparring", min_length=1, description="project in Weights & Biases")
    name: str | None = Field(None, description="name of the run in Weights & Biases; null: name of the run folder")
    video_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="maximum share of a run's time for videos; those of evaluations are exempt; 1: no limit",
    )
    rerun: bool = Field(False, description="also write videos as recording.rrd, for the Rerun viewer")
