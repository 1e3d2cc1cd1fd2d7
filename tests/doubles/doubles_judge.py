"""A world model that scores a transition by its action, so that intrinsic rewards can be computed by hand."""

from collections import Counter

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import nn

from sparring.config.section import Section
from sparring.world_models.world_model import WorldModel


class JudgeConfig(Section):
    """A world model that computes its scores from the action."""

    weight: float = Field(1.0, description="initial weight")


class JudgingWorldModel(WorldModel):
    """error: |action|; entropy: 2 |action|; disagreement: 3 |action|; surprise: 4 |action|, of the first entry.

    Memory [2]: decisions since the episode began, the sum of their first action entries (without the head camera the
    sum stays).
    """

    memory_size = 2
    members = 1

    def __init__(self, config: JudgeConfig, spec, chunk: int):
        super().__init__()
        self.cameras = tuple(name.removeprefix("image/") for name in spec.observation if name.startswith("image/"))
        self.weight = nn.Parameter(torch.tensor(config.weight))
        self.calls = Counter()
        self.entered: list[torch.Tensor] = []

    def observe(self, td, without=()):
        self.calls["observe"] += 1
        return self._after(td, without)

    def score(self, td, without=()):
        self.calls["score"] += 1
        self.entered.append(td["memory", "world_model"].clone())
        size = self.weight * td["action"][:, 0, 0].abs()
        scores = {name: k * size for k, name in enumerate(("error", "entropy", "disagreement", "surprise"), 1)}
        return TensorDict(scores | {"accuracy": 1 - size, "memory": self._after(td, without)}, [len(td)])

    def predict(self, td, without=()):
        """The last frame and the first entry of the memory, in the red of every pixel."""
        memory = self._after(td, without)
        pictures = {name: picture.clone() for name, picture in td["observation", "image"].items()}
        for picture in pictures.values():
            picture[:, 0] = memory[:, 0, None, None].to(torch.uint8)
        return TensorDict({"image": pictures, "memory": memory}, [len(td)])

    def _after(self, td, without):
        seen = torch.stack([torch.ones(len(td)), td["action"][:, 0, 0] * ("head" not in without)], 1)
        return td["memory", "world_model"] + seen
