"""What a phase starts from: the world model and the episodes of an earlier run, where they fit."""

from sparring.config.schema import Config
from sparring.data.episodes import EpisodeStore
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.runs.checkpoint import checkpoint_folder, load_spec
from sparring.runs.fits import load_part
from sparring.world_models.world_model import WorldModel, make_world_model


def load_teacher(path: str, key: str, config: Config, env: Env) -> WorldModel:
    """The world model of an earlier run: of the same config, trained in an env like this one.

    `key`: the setting that `path` was given as.
    """
    model = make_world_model(config.world_model, env.spec, config.rollout.action_steps)
    load_part(model, "world_model", path, key, config, env)
    if not model.ready:
        raise UserError(
            f"{key}={path}: that world model is still learning its tokens and foretells nothing yet; train it further "
            "(the same command goes on), or another one with a smaller world_model.tokenizer_steps"
        )
    return model


def open_episodes(path: str, key: str, env: Env, rank: int = 0) -> EpisodeStore:
    """What a world model learned from; of a run of several processes, the episodes of process `rank`.

    Refused where `env` has other instructions: episodes hold them by number.
    """
    checkpoint = checkpoint_folder(path)
    theirs = load_spec(checkpoint).instructions
    if theirs != env.spec.instructions:
        shown = [", ".join(repr(text) for text in texts[:3]) for texts in (theirs, env.spec.instructions)]
        raise UserError(
            f"{key}={path}: its episodes are of other tasks: {shown[0]}, here {shown[1]}; leave out env.task (it comes "
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
