"""A world model whose numbers can be computed by hand."""

from collections import Counter

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import nn

from sparring.config.section import Section
from sparring.world_models.world_model import WorldModel


class CopyingConfig(Section):
    """A world model that predicts a copy of the last frame."""

    brighter: float = Field(0.0, description="initial brightness")


class CopyingWorldModel(WorldModel):
    """Predicts the last frame, `brighter` by some 1/255, its only parameter; a token is a whole image.

    Memory: decisions since the episode began, and the sum of their first action entries.
    """

    memory_size = 2
    members = 1

    def __init__(self, config: CopyingConfig, spec, chunk: int):
        super().__init__()
        self.cameras = tuple(name.removeprefix("image/") for name in spec.observation if name.startswith("image/"))
        self.brighter = nn.Parameter(torch.tensor(config.brighter))
        self.calls = Counter()

    def loss(self, batch):
        self.calls["loss"] += 1
        memory, memories = self._entered(batch[:, 0]), []
        for t in range(batch.shape[1]):
            here = batch["mask"][:, t, None]
            cleared = torch.where(batch["is_first"][:, t, None], 0.0, memory)
            memory = torch.where(here, cleared + self._seen(batch[:, t]), memory)
            memories.append(memory)
        batch["memory_after"] = torch.stack(memories, 1)
        loss, alike = 0.0, []
        for camera in self.cameras:
            before, after = (batch[*side, "observation", "image", camera].float() for side in ((), ("next",)))
            error = (before + self.brighter - after).square().mean((-3, -2, -1)) / 255
            loss = loss + error[batch["mask"]].mean()
            alike.append((before == after).all(-1).all(-1).all(-1)[batch["mask"]].float().mean())
        accuracy = torch.stack(alike).mean()
        parts = {"accuracy": accuracy, "accuracy_copy": accuracy, "accuracy_changed": torch.zeros(())}
        return loss, parts | {"loss": loss.detach()}

    def observe(self, td, without=()):
        self.calls["observe"] += 1
        return self._entered(td) + self._seen(td)

    def predict(self, td, without=()):
        self.calls["predict"] += 1
        pictures = td["observation", "image"]
        brighter = {c: (pictures[c] + self.brighter).round().clamp(0, 255).to(torch.uint8) for c in self.cameras}
        nothing = torch.zeros(len(td))
        heads = {"reward": nothing, "terminated": nothing, "success": nothing}
        state = td["observation"].get("state", torch.zeros(len(td), 1))
        memory = self._entered(td) + self._seen(td)
        return TensorDict({"image": brighter, "state": state + 0 * self.brighter, "memory": memory} | heads, [len(td)])

    def score(self, td, without=()):
        self.calls["score"] += 1
        predicted = self.predict(td)["image"]
        self.calls["predict"] -= 1
        true = td["next", "observation", "image"]
        wrong = torch.stack([(predicted[c] != true[c]).flatten(1).any(1).float() for c in self.cameras]).mean(0)
        heads = {"error": wrong + td["action"][:, 0, 0].abs(), "accuracy": 1 - wrong}
        heads |= {name: torch.zeros(len(td)) for name in ("entropy", "disagreement", "surprise")}
        return TensorDict(heads | {"memory": self._entered(td) + self._seen(td)}, [len(td)])

    def correct_tokens(self, td):
        self.calls["correct_tokens"] += 1
        predicted, now, true = self.predict(td)["image"], td["observation", "image"], td["next", "observation", "image"]
        self.calls["predict"] -= 1
        heads = {
            name: torch.stack([(pictures[c] == true[c]).flatten(1).all(1) for c in self.cameras], 1)
            for name, pictures in (("right", predicted), ("copied", now))
        }
        return TensorDict(heads, [len(td)])

    def reconstruct(self, td):
        self.calls["reconstruct"] += 1
        return TensorDict({"image": td["next", "observation", "image"].clone()}, [len(td)])

    def _entered(self, td):
        memory = td.get(("memory", "world_model"), None)
        memory = self.empty_memory(len(td)) if memory is None else memory
        return torch.where(td.get("is_first", torch.zeros(len(td), dtype=torch.bool))[:, None], 0.0, memory)

    def _seen(self, td):
        return torch.stack([torch.ones(len(td)), td["action"][:, 0, 0]], 1)
