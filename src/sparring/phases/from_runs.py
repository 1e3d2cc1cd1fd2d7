"""What a phase starts from: the world model, the explorer and the episodes of earlier runs, where they fit."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from sparring.config.text import flatten, read_settings
from sparring.contract import EnvSpec
from sparring.data.episodes import EpisodeStore
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.runs.checkpoint import SAME_MEANING, checkpoint_folder, load_spec, load_weights, spec_differences
from sparring.world_models.world_model import WorldModel, make_world_model

# section of a config -> what it makes, and the phases that train it
_MADE_BY = {
    "world_model": ("world models", ("teacher", "adversarial")),
    "policy": ("explorers", ("student", "adversarial")),
}


def load_teacher(path: str, key: str, config, env: Env) -> WorldModel:
    """The world model of an earlier run: its config, its weights, and an env like the one it learned in.

    `key` is what `path` was given as.
    """
    model = make_world_model(config.world_model, env.spec, config.rollout.action_steps)
    load_part(model, "world_model", path, key, config, env)
    if not model.ready:
        raise UserError(
            f"{key}={path}: that world model is still learning its tokens and foretells nothing yet; train it further "
            "(the same command goes on), or another one with a smaller world_model.tokenizer_steps"
        )
    return model


def load_part(model: nn.Module, section: str, path: str, key: str, config, env: Env) -> None:
    """The weights of what `section` of an earlier run's config made; refused where that run and this one differ."""
    folder = checkpoint_folder(path)
    trained = {setting.key: setting.value for setting in read_settings(folder / "config.yaml")}
    differences = _differences(folder, trained, section, config, env)
    if differences:
        advice = "leave out what you gave (the rest comes with it), or train another"
        raise UserError("\n".join([f"{key}={path}: that does not fit this run:", *differences, advice]))
    # of an adversarial run both are saved, under these names
    load_weights(model, folder, f"{section}." if trained["phase"] == "adversarial" else "")


def episodes_of(path: str, key: str, env: Env, rank: int = 0) -> EpisodeStore:
    """What a world model learned from, beside its checkpoints; of several processes, what that of `rank` collected.

    Refused where `env` has other instructions: the episodes tell theirs by number.
    """
    checkpoint = checkpoint_folder(path)
    theirs = load_spec(checkpoint).instructions
    if theirs != env.spec.instructions:
        told = [", ".join(repr(text) for text in texts[:3]) for texts in (theirs, env.spec.instructions)]
        raise UserError(
            f"{key}={path}: its episodes are of other tasks: {told[0]}, here {told[1]}; leave out env.task (it comes "
            "with the world model), or train a world model on this task"
        )
    found = [folder / "episodes" for folder in (checkpoint, checkpoint.parent) if (folder / "episodes").is_dir()]
    if not found:
        raise UserError(
            f"{key}={path}: there is no folder 'episodes' with it, of what it learned from; give the run folder that "
            "the world model was trained in"
        )
    own = found[0].with_name(f"episodes-{rank}")
    store = EpisodeStore(own if rank and own.is_dir() else found[0], read_only=True)
    if not len(store):
        raise UserError(f"{key}={path}: there are no episodes in '{store.folder}'; train the world model again")
    return store


def _differences(folder: Path, trained: dict, section: str, config, env: Env) -> list[str]:
    """In words: between the run of this checkpoint and this one."""
    what, phases = _MADE_BY[section]
    if trained["phase"] not in phases:
        return [f"it was made by `sparring train {trained['phase']}`; {what} come of `sparring train {phases[0]}`"]
    now = {f"{section}.{key}": v for key, v in flatten(getattr(config, section).model_dump(mode="json")).items()}
    # a key that there was not at that time is not held against it: weights are loaded strictly
    now = {key: value for key, value in now.items() if key in trained}
    now["rollout.action_steps"] = config.rollout.action_steps
    now |= {f"env.{key}": getattr(env.config, key) for key in SAME_MEANING if hasattr(env.config, key)}
    found = [f"{key} was {trained.get(key)} and is {value}" for key, value in now.items() if trained.get(key) != value]
    return found + spec_differences(_foreseen(load_spec(folder)), _foreseen(env.spec))


def _foreseen(spec: EnvSpec) -> EnvSpec:
    """What a world model reads; what is measured beside it may differ."""
    read = {name: kind for name, kind in spec.observation.items() if name.partition("/")[0] in ("image", "state")}
    return replace(spec, observation=read)
