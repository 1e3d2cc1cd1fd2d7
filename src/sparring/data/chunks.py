"""Action chunks of demonstrations, as an env with a given spec would observe and execute them."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from sparring.contract import POLICY_MEMORY, EnvSpec
from sparring.data.dataset import DatasetError
from sparring.data.demonstrations import NUMBERS, Demonstrations
from sparring.data.mapping import INSTRUCTION
from sparring.data.statistics import number_statistics
from sparring.policies.policy import Policy

_AT_ONCE = 1024  # steps per forward pass that computes memories


class ActionChunks:
    """`sample(B)`: observations of uniformly drawn steps, and the `horizon` actions from each of them on.

    Observations match an env with `spec`: other entries are omitted, vectors are padded to its sizes, and
    `observation/task` indexes its instructions. Images are of the cameras that the datasets were opened with, which
    needs cache=True. Uses the first `episodes` of each dataset (None: all). B drawn steps, H steps of a chunk, A action
    dims, F steps.
    """

    def __init__(
        self, demonstrations: Sequence[Demonstrations], horizon: int, spec: EnvSpec, episodes: int | None = None
    ):
        self.demonstrations, self.horizon = list(demonstrations), horizon
        self.lengths = [demos.lengths[:episodes] for demos in self.demonstrations]
        # first step of each dataset among the F steps, and the end of the last dataset
        self._starts = np.cumsum([0] + [int(lengths.sum()) for lengths in self.lengths])
        # [E]: length and first step of each episode; [F]: the end of the episode of each step
        self.episode_lengths = torch.from_numpy(np.concatenate(self.lengths).astype(np.int64))
        self.first_steps = self.episode_lengths.cumsum(0) - self.episode_lengths
        self._ends = self.episode_lengths.cumsum(0).repeat_interleave(self.episode_lengths)
        self._cameras = [camera for camera in demonstrations[0].cameras if f"image/{camera}" in spec.observation]
        shown = {name: spec.observation[name][0] for name in NUMBERS if name in spec.observation}
        self._refuse_missing_entries(spec, shown)
        self._observation = {name: self._joined(f"observation.{name}", shape) for name, shape in shown.items()}
        # which instruction each step has [F]; free text [I, L], or None where the env lists its instructions
        self._texts: torch.Tensor | None = None
        if "instruction" in spec.observation:
            self._texts, self._task = self._text_of_each_step(spec)
        else:
            self._task = self._task_of_each_step(spec)
        self._action = self._joined("action", (spec.action_dim,))
        self._action_padding = spec.action_padding

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def episodes(self) -> int:
        return sum(len(lengths) for lengths in self.lengths)

    def sample(self, batch_size: int, generator: torch.Generator) -> TensorDict:
        """`[B]`: `observation/*`, `action [B, H, A]`, `valid [B, H]` (false after the end), and `step` in 0..F-1."""
        step = torch.randint(len(self), (batch_size,), generator=generator)
        drawn = {"observation": self.observation(step), "action": self.actions(step)}
        return TensorDict(drawn | {"valid": self.valid(step), "step": step}, [batch_size])

    def observation(self, step: torch.Tensor) -> dict:
        """The observation at the steps [B]."""
        found: dict = {name: values[step] for name, values in self._observation.items()}
        if self._texts is None:
            found["task"] = self._task[step]
        else:
            found["instruction"] = self._texts[self._task[step]]
        if self._cameras:
            found["image"] = {camera: self._images(camera, step.numpy()) for camera in self._cameras}
        return found

    def valid(self, step: torch.Tensor) -> torch.Tensor:
        """`[B, H]`: false after the end of an episode."""
        return step[:, None] + torch.arange(self.horizon) < self._ends[step, None]

    def actions(self, step: torch.Tensor) -> torch.Tensor:
        """`[B, H, A]` from the steps [B] on; after the end of an episode, its last action is repeated."""
        following, ends = step[:, None] + torch.arange(self.horizon), self._ends[step, None]
        return self._action[following.clamp(max=ends - 1)]

    @torch.no_grad()
    def memory(self, policy: Policy, device: torch.device, episodes: torch.Tensor | None = None) -> torch.Tensor:
        """Compute `memory/policy` [F, M] before a decision at each of the F demonstrated steps. `episodes`: numbers of
        those that are needed (None: all); the rows of others are 0.

        A policy decides every C steps: before step t it decided at steps t - C, t - 2 C and so on, and first at step 0.
        """
        memory = torch.zeros(len(self), policy.memory_size, device=device)
        after = torch.zeros_like(memory)
        chosen = torch.arange(self.episodes) if episodes is None else episodes
        for t in range(int(self.episode_lengths[chosen].max())):
            # step t of the episodes that are long enough
            steps = self.first_steps[chosen[self.episode_lengths[chosen] > t]] + t
            if t:
                memory[steps] = after[steps - min(t, policy.chunk)]
            for part in steps.split(_AT_ONCE):
                acted = self.actions(part)[:, : policy.chunk]
                td = TensorDict({"observation": self.observation(part), "action": acted}, [len(part)])
                after[part] = policy.remember(td.to(device).set(POLICY_MEMORY, memory[part]))
        return memory

    def statistics(self) -> dict[str, dict[str, np.ndarray]]:
        """Statistics of used steps: "observation/state", "observation/privileged" and "action" (without padding)."""
        vectors = {name: values for name, values in self._observation.items() if values.ndim == 2}
        found = {f"observation/{name}": number_statistics(values.numpy()) for name, values in vectors.items()}
        scored = self._action[:, : self._action.shape[1] - self._action_padding]
        return found | {"action": number_statistics(scored.numpy())}

    def _joined(self, feature: str, shape: tuple[int, ...]) -> torch.Tensor:
        """`[F, *shape]` float32 of all datasets, with vectors padded by zeros."""
        parts = []
        for demos, steps in zip(self.demonstrations, np.diff(self._starts), strict=True):
            values = np.asarray(demos.numbers(feature)[:steps], np.float32).reshape(steps, -1)
            parts.append(np.pad(values, ((0, 0), (0, math.prod(shape) - values.shape[1]))))
        return torch.from_numpy(np.concatenate(parts).reshape(-1, *shape))

    def _images(self, camera: str, step: np.ndarray) -> torch.Tensor:
        """`[B, 3, H, W]` uint8."""
        dataset = np.searchsorted(self._starts, step, side="right") - 1
        caches = [demos.image_cache(camera) for demos in self.demonstrations]
        images = np.empty((len(step), *caches[0].shape[1:]), np.uint8)
        for number, (demos, cache) in enumerate(zip(self.demonstrations, caches, strict=True)):
            here = dataset == number
            images[here] = cache[demos.frames[step[here] - self._starts[number]]]
        return torch.from_numpy(images)

    def _text_of_each_step(self, spec: EnvSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """The instructions `[I, L]` of all datasets as UTF-8, and the index of each step `[F]`."""
        rows: list[np.ndarray] = []
        indices, (length,) = [], spec.observation["instruction"][0]
        for demos, steps in zip(self.demonstrations, np.diff(self._starts), strict=True):
            if not demos.mapping.keys(INSTRUCTION) and not demos.dataset.is_own:
                needs = "the env observes an instruction, and the dataset has none"
                raise DatasetError(f"'{demos.path}': {needs}; set imitate.keys={{KEY: instruction}}, or env.roles")
            indices.append(len(rows) + demos.task_index[:steps])
            for text in map(str.encode, demos.instructions):
                if len(text) > length:
                    has = f"the instruction {text.decode()[:40]!r}... has {len(text)} bytes"
                    raise DatasetError(f"'{demos.path}': {has}, the env's observation/instruction holds {length}")
                rows.append(np.frombuffer(text.ljust(length, b"\0"), np.uint8))
        return torch.from_numpy(np.stack(rows)), torch.from_numpy(np.concatenate(indices).astype(np.int64))

    def _task_of_each_step(self, spec: EnvSpec) -> torch.Tensor:
        """`[F]`: indices into spec.instructions, matched by text, because each dataset has its own numbering; 0 if the
        env does not observe its task."""
        if "task" not in spec.observation:
            return torch.zeros(len(self), dtype=torch.int64)
        parts = []
        for demos, steps in zip(self.demonstrations, np.diff(self._starts), strict=True):
            index = demos.task_index[:steps]
            used = [demos.instructions[i] for i in np.unique(index)]
            unknown = [text for text in used if text not in spec.instructions]
            if unknown:
                raise DatasetError(
                    f"'{demos.path}' demonstrates {', '.join(map(repr, unknown))}; the instructions of the env are "
                    f"{', '.join(map(repr, dict.fromkeys(spec.instructions)))}: set env.task to the recorded task"
                )
            known = [spec.instructions.index(text) if text in spec.instructions else -1 for text in demos.instructions]
            parts.append(np.array(known)[index])
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def _refuse_missing_entries(self, spec: EnvSpec, shown: dict[str, tuple[int, ...]]) -> None:
        for demos in self.demonstrations:
            mistakes = []
            for name, shape in shown.items():
                recorded = demos.has(f"observation.{name}")
                found = math.prod(demos.shape(f"observation.{name}")[1:]) if recorded else 0
                # a state may be padded
                if not found or found > math.prod(shape) or (name != "state" and found < math.prod(shape)):
                    mistake = f"observation.{name}: expected {math.prod(shape)} entries, found {found or 'none'}"
                    # a different number of entries means a different task
                    key = {"privileged": "object_state", "points": "points"}.get(name, "task") if not found else "task"
                    unknown = name == "state" and not demos.dataset.is_own
                    mistakes.append(mistake + (demos.mapping.state_advice() if unknown else demos.recorded_with(key)))
            for name in spec.observation:
                if (kind := name.partition("/")[0]) in ("depth", "segmentation"):
                    fix = f"set env.{kind}=false"
                    mistakes.append(f"observation/{name}: part of the env's observation, but never recorded; {fix}")
            if mistakes:
                raise DatasetError("\n".join([f"'{demos.path}' does not match the env's observation:", *mistakes]))
