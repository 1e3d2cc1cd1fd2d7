"""From the `world_model` section of a config to a WorldModel."""

from sparring.config import Section
from sparring.resolve import resolve
from sparring.world_models import WORLD_MODELS
from sparring.world_models.world_model import WorldModel


def make_world_model(config: Section, spec, chunk: int) -> WorldModel:
    """A fresh world model of an env with this spec, acted on in chunks of `chunk` steps."""
    return resolve(config.name, WORLD_MODELS, "world model")(config, spec, chunk)
