"""`sparring eval`: evaluates a checkpoint on held-out episodes as a policy, an explorer or a world model."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from sparring.api import load_policy, load_world_model
from sparring.config.schema import Config, load_config
from sparring.config.text import Setting, flatten, value_text
from sparring.config.trust import trusted_settings
from sparring.contract import EnvSpec
from sparring.envs.configs import DatasetConfig
from sparring.envs.env import make_env
from sparring.errors import UserError
from sparring.evaluation.action_error import ActionError
from sparring.evaluation.exploration import ExplorationEvaluation
from sparring.evaluation.files import EvaluationFiles, EvaluationResult, refuse_unwritable, terminal_width
from sparring.evaluation.play import Evaluation
from sparring.evaluation.world_model import WorldModelEvaluation
from sparring.phases.phase import Progress
from sparring.processes.distributed import pick_device
from sparring.processes.files import refuse_links_out
from sparring.record.videos import VideoWriter
from sparring.runs.checkpoint import CheckpointError, checkpoint_folder, load_spec, load_training_state
from sparring.runs.fits import spec_differences
from sparring.world_models.world_model import WorldModel

# settings that an evaluation may change; the others are fixed by training
FREE_TO_CHOOSE = ("env.", "rollout.n_envs", "rollout.max_episode_steps", "evaluation.", "seed", "device", "threads")
# settings of env. that change how episodes are computed, rendered and measured, but not the episodes themselves
SAME_EPISODES = ("env.segmentation", "env.video_renderer", "env.threads", "env.vectorize", "env.workers")


def evaluate_checkpoint(
    path: str,
    settings: list[Setting],
    kind: Literal["eval", "eval_world_model", "eval_exploration"] = "eval",
    json_file: Path | None = None,
    greedy: bool = True,
    both: bool = False,
    videos: int = 0,
    against: str | None = None,
) -> EvaluationResult:
    """Print a table, and write the numbers and videos to the folder of the run or checkpoint."""
    checkpoint, config = open_checkpoint(path, settings, is_policy=kind != "eval_world_model")
    now, trained = flatten(config.dump()), load_config(None, trusted_settings(checkpoint), inherit=False)
    changed = {key: now[key] for key in episode_differences(trained, config, SAME_EPISODES) if key in now}
    if config.env.name != trained.env.name:  # another kind of env has other settings: only the given ones
        changed = {setting.key: now[setting.key] for setting in settings if setting.key in changed}
    files = EvaluationFiles.of(Path(path) if Path(path).is_dir() else checkpoint, kind, changed, json_file)
    refuse_links_out(files.folder)
    refuse_unwritable(files.json_file)
    if videos:
        refuse_unwritable(files.folder / f"{files.name}.mp4", "leave out --videos")
    device = pick_device(config.device)
    result: EvaluationResult
    if kind == "eval_world_model":
        model = load_world_model(checkpoint, device)
        other = None if against is None else load_other_world_model(against, path, config)
        result, how = WorldModelEvaluation.run(config, model, device, other), "random actions"
    elif kind == "eval_exploration":
        result, how = ExplorationEvaluation.run(config, load_policy(checkpoint, device), device), "sampled actions"
    else:
        policy = load_policy(checkpoint, device)
        shown: dict[str, Any] = {"greedy": greedy, "videos": videos, "both": both}
        if isinstance(config.env, DatasetConfig):
            if videos or both or not greedy:
                has = "env.name=dataset has no simulator: greedy actions are compared with demonstrated ones"
                raise UserError(f"{has}; remove --videos, --both and --stochastic, or set env.name to an env")
            split = _phase_state(checkpoint).get("held_out")
            result, how = ActionError.run(config, policy, device, load_spec(checkpoint), split), "greedy actions"
        else:
            result = played = Evaluation.run(config, policy, device, **shown)
            both = "policy, sampled" in played.scores
            how = "greedy and sampled actions" if both else "greedy actions" if greedy else "sampled actions"
    changed_text = " ".join(f"{key}={value_text(value)}" for key, value in changed.items())
    print(f"{checkpoint}: {result.episodes} held-out episodes, {how}{f', with {changed_text}' if changed else ''}")
    print(result.table(terminal_width()))
    about = {"checkpoint": str(checkpoint), "how": how, "settings": changed}
    print(f"numbers: {result.write(files.json_file, about)}")
    if isinstance(result, Evaluation) and result.videos:
        files.remove_videos()
        progress, writer = _progress(checkpoint), VideoWriter(files.folder)
        for number, video in enumerate(result.videos):
            file = writer.record_video(f"{files.name}_{number}", "eval", video, progress, result.spec, changed_text)
            print(f"video: {file}")
            writer.finish()  # one at a time: a full queue would skip videos
    if isinstance(result, Evaluation) and result.no_video_reason:
        print(f"no video: {result.no_video_reason}")
    return result


def open_checkpoint(path: str, settings: list[Setting], is_policy: bool = True) -> tuple[Path, Config]:
    """Returns the checkpoint at `path` and its config with `settings`; raises UserError if they do not fit."""
    checkpoint = checkpoint_folder(path)
    saved = trusted_settings(checkpoint)
    trained = load_config(None, saved, inherit=False)
    if isinstance(trained.env, DatasetConfig) and any(setting.key == "env.name" for setting in settings):
        # another kind of env has other settings
        saved = [setting for setting in saved if not setting.key.startswith("env.")]
    config = load_config(None, saved + settings, inherit=False)
    before, now = flatten(trained.dump()), flatten(config.dump())
    is_dataset = isinstance(config.env, DatasetConfig)
    if is_dataset and not isinstance(trained.env, DatasetConfig):
        raise UserError(f"env.name=dataset: '{path}' was trained in an env; no demonstrations were held out from it")
    # what a dataset becomes is fixed by training
    free = tuple(key for key in FREE_TO_CHOOSE if key != "env." or not is_dataset)
    changed = [key for key in now if before.get(key) != now[key] and not key.startswith(free)]
    if changed:
        allowed = f"an evaluation accepts {', '.join(free)}"
        raise UserError(f"{', '.join(changed)}: cannot be changed after training; {allowed}")
    if is_policy and config.phase == "teacher":
        raise UserError(f"'{path}' holds a world model, not a policy; give --world-model")
    _refuse_other_env(checkpoint, config)
    return checkpoint, config


def load_other_world_model(other: str, path: str, config: Config) -> WorldModel:
    """Load a world model that can predict the episodes of the one at `path`, which has this config."""
    _refuse_other_env(checkpoint_folder(other), config)
    steps = load_config(None, trusted_settings(checkpoint_folder(other)), inherit=False).rollout.action_steps
    if steps != config.rollout.action_steps:
        mismatch = f"rollout.action_steps={steps}, but {config.rollout.action_steps} for '{path}'"
        raise UserError(f"'{other}': {mismatch}; world models are compared on the same episodes only")
    return load_world_model(other, pick_device(config.device))


def _refuse_other_env(checkpoint: Path, config: Config) -> None:
    if isinstance(config.env, DatasetConfig):
        return  # ActionError compares the demonstrations
    env = make_env(config.env, 1, config.rollout.max_episode_steps)
    env.close()

    def policy_view(spec: EnvSpec) -> EnvSpec:
        # policies do not observe the segmentation; only measures read it
        observed = {name: kind for name, kind in spec.observation.items() if not name.startswith("segmentation/")}
        return replace(spec, observation=observed)

    differences = spec_differences(policy_view(load_spec(checkpoint)), policy_view(env.spec))
    if differences:
        raise UserError("\n".join([f"'{checkpoint}' was trained in another env:", *differences]))


def episode_differences(a: Config, b: Config, ignored: tuple[str, ...]) -> list[str]:
    """The settings by which the episodes of two configs differ, without the `ignored` ones of env."""
    of_a, of_b = flatten(a.dump()), flatten(b.dump())
    keys = [key for key in sorted(of_a.keys() | of_b.keys()) if key.startswith("env.") and key not in ignored]
    differing = [key for key in keys if of_a.get(key) != of_b.get(key)]
    limit = "rollout.max_episode_steps"
    # null means the limit of the env, which may equal the other limit
    limits_differ = of_a[limit] != of_b[limit] and _limits(a) != _limits(b)
    return [*differing, limit] if limits_differ else differing


def _limits(config: Config) -> list[int | None]:
    if isinstance(config.env, DatasetConfig):
        return []
    tasks, limits = getattr(config.env, "task", ()), list[int | None]()
    several = isinstance(tasks, tuple) and len(tasks) > 1
    for single in [config.env.model_copy(update={"task": (task,)}) for task in tasks] if several else [config.env]:
        env = make_env(single, 1, config.rollout.max_episode_steps)
        limits.append(env.spec.max_episode_steps)
        env.close()
    return limits


def _phase_state(checkpoint: Path) -> dict[str, Any]:
    try:
        return dict(load_training_state(checkpoint)["phase"])
    except (CheckpointError, KeyError, TypeError, ValueError):  # weights alone, or a user-defined phase
        return {}


def _progress(checkpoint: Path) -> Progress:
    try:
        return Progress(**_phase_state(checkpoint)["progress"])
    except (KeyError, TypeError):
        number = checkpoint.name.rpartition("-")[2]
        return Progress(updates=int(number) if number.isdecimal() else 0)
