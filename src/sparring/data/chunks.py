"""ActionChunks: what demonstrators saw and what they did from there on, drawn at random for imitation.

Letters: B drawn steps, H steps of a chunk, A action dims, F steps of all demonstrations that are used.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from sparring.data import statistics
from sparring.data.demonstrations import Demonstrations
from sparring.data.lerobot import DatasetError

# what is read of a dataset beside pictures and the task; its keys are entries of the env's observation
_NUMBERS = ("state", "privileged", "points")


class ActionChunks:
    """`sample(B)`: the observation of a step, each equally likely, and the `horizon` actions from there on.

    As an env with `spec` would show it: entries it does not have are left out, vectors are padded to its sizes, and
    `observation/task` indexes its instructions. Of each dataset only the first `episodes` are used (None: all).
    Datasets with pictures must have been opened with cache=True.
    """

    def __init__(self, demonstrations: Sequence[Demonstrations], horizon: int, spec, episodes: int | None = None):
        self.demonstrations, self.horizon = list(demonstrations), horizon
        self.lengths = [demos.lengths[:episodes] for demos in self.demonstrations]
        # where each dataset begins among the F steps, and where the last one ends
        self._starts = np.cumsum([0] + [int(lengths.sum()) for lengths in self.lengths])
        # [E]: steps of each episode, and where among the F it begins; [F]: where the episode of each step ends
        self.episode_lengths = torch.from_numpy(np.concatenate(self.lengths).astype(np.int64))
        self.first_steps = self.episode_lengths.cumsum(0) - self.episode_lengths
        self._ends = self.episode_lengths.cumsum(0).repeat_interleave(self.episode_lengths)
        self._cameras = [name.removeprefix("image/") for name in spec.observation if name.startswith("image/")]
        shown = {name: spec.observation[name][0] for name in _NUMBERS if name in spec.observation}
        self._refuse_what_is_not_recorded(spec, shown)
        self._observation = {name: self._joined(f"observation.{name}", shape) for name, shape in shown.items()}
        self._task = self._task_of_each_step(spec)
        self._action = self._joined("action", (spec.action_dim,))
        self._action_padding = spec.action_padding

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def episodes(self) -> int:
        return sum(len(lengths) for lengths in self.lengths)

    def sample(self, batch_size: int, generator: torch.Generator) -> TensorDict:
        """`[B]`: `observation/*`, `action [B, H, A]`, and `valid [B, H]`, false past the episode's end.

        And `step`, their numbers among the F.
        """
        step = torch.randint(len(self), (batch_size,), generator=generator)
        valid = step[:, None] + torch.arange(self.horizon) < self._ends[step, None]
        drawn = {"observation": self.observation(step), "action": self.actions(step), "valid": valid, "step": step}
        return TensorDict(drawn, [batch_size])

    def observation(self, step: torch.Tensor) -> dict:
        """What was seen at the steps [B]."""
        seen = {name: values[step] for name, values in self._observation.items()} | {"task": self._task[step]}
        if self._cameras:
            seen["image"] = {camera: self._pictures(camera, step.numpy()) for camera in self._cameras}
        return seen

    def actions(self, step: torch.Tensor) -> torch.Tensor:
        """`[B, H, A]` from the steps [B] on; past the end, the last action again."""
        following, ends = step[:, None] + torch.arange(self.horizon), self._ends[step, None]
        return self._action[following.clamp(max=ends - 1)]

    def statistics(self) -> dict[str, dict[str, np.ndarray]]:
        """Of the steps that are used: "observation/state", "observation/privileged" and "action" (without padding)."""
        vectors = {name: values for name, values in self._observation.items() if values.ndim == 2}
        found = {f"observation/{name}": statistics.of_numbers(values.numpy()) for name, values in vectors.items()}
        scored = self._action[:, : self._action.shape[1] - self._action_padding]
        return found | {"action": statistics.of_numbers(scored.numpy())}

    def _joined(self, feature: str, shape: tuple[int, ...]) -> torch.Tensor:
        """`[F, *shape]` float32 of all datasets, vectors padded with zeros."""
        parts = []
        for demos, steps in zip(self.demonstrations, np.diff(self._starts), strict=True):
            values = np.asarray(demos.numbers(feature)[:steps], np.float32).reshape(steps, -1)
            parts.append(np.pad(values, ((0, 0), (0, math.prod(shape) - values.shape[1]))))
        return torch.from_numpy(np.concatenate(parts).reshape(-1, *shape))

    def _pictures(self, camera: str, step: np.ndarray) -> torch.Tensor:
        """`[B, 3, H, W]` uint8."""
        dataset = np.searchsorted(self._starts, step, side="right") - 1
        caches = [demos.image_cache(camera) for demos in self.demonstrations]
        pictures = np.empty((len(step), *caches[0].shape[1:]), np.uint8)
        for number, cache in enumerate(caches):
            here = dataset == number
            pictures[here] = cache[step[here] - self._starts[number]]
        return torch.from_numpy(pictures)

    def _task_of_each_step(self, spec) -> torch.Tensor:
        """`[F]`: by what was said, as a dataset numbers its instructions in its own way."""
        parts = []
        for demos, steps in zip(self.demonstrations, np.diff(self._starts), strict=True):
            index = demos.dataset.columns["task_index"][:steps]
            said = [demos.instructions[i] for i in np.unique(index)]
            unknown = [text for text in said if text not in spec.instructions]
            if unknown:
                raise DatasetError(
                    f"'{demos.path}' demonstrates {', '.join(map(repr, unknown))}, which the env never asks for; it "
                    f"asks for {', '.join(map(repr, dict.fromkeys(spec.instructions)))}: choose its task with env.task"
                )
            known = [spec.instructions.index(text) if text in spec.instructions else -1 for text in demos.instructions]
            parts.append(np.array(known)[index])
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def _refuse_what_is_not_recorded(self, spec, shown: dict[str, tuple[int, ...]]) -> None:
        for demos in self.demonstrations:
            mistakes = []
            for name, shape in shown.items():
                recorded = f"observation.{name}" in demos.dataset.columns
                found = demos.numbers(f"observation.{name}").reshape(demos.steps, -1).shape[1] if recorded else 0
                # a state may be padded
                if not found or found > math.prod(shape) or (name != "state" and found < math.prod(shape)):
                    mistakes.append(f"observation.{name}: expected {math.prod(shape)} entries, found {found or 'none'}")
            other = [name for name in spec.observation if name.partition("/")[0] in ("depth", "segmentation")]
            mistakes += [f"observation/{name}: the env shows it, and datasets do not hold it" for name in other]
            if mistakes:
                raise DatasetError("\n".join([f"'{demos.path}' does not hold what the env shows:", *mistakes]))
