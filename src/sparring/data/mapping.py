"""Maps the keys of a dataset to the entries of an observation and to the action. Torch-free.

Roles are those of envs/observations.py: image/<name>, points, state, instruction, ignore; and privileged, action. They
are set by `imitate.keys`, or inferred where that is unambiguous. Several keys may be `state` or `action`: their numbers
are joined, in the order of `imitate.keys` or of the env's entries. Letters: E entries of a vector, P points.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from sparring.contract import EnvSpec
from sparring.data.dataset import POSITION, TASK, Dataset, DatasetError

ACTION, STATE, PRIVILEGED = "action", "state", "privileged"
POINTS, INSTRUCTION, IGNORE = "points", "instruction", "ignore"
_IMAGE = "image/"
_ROLE = re.compile(r"image/[A-Za-z0-9_.-]+|action|state|privileged|points|instruction|ignore")
_ACTIONS = ("action", "actions")  # what formats call it
_OWN_STATE = "observation.state"
_CAMERA = re.compile(r"^(rgb_|cam_|image_)|(_image|_rgb|_cam)$")


class KeyMap:
    """`roles`: key -> role, of the used keys, joined ones in order; `reasons`: key -> why it is not used."""

    def __init__(self, dataset: Dataset, given: Mapping[str, str] | None = None, spec: EnvSpec | None = None):
        """`given`: key -> role, for some keys; `spec`: of the env whose observations the keys become; None: any."""
        self.dataset, self.spec = dataset, spec
        self.reasons = dict(dataset.unused)
        self.given = dict(given or {})
        self._refuse_unfit()
        self.roles = {key: role for key, role in self.given.items() if role != IGNORE}
        self.reasons |= {key: "imitate.keys" for key, role in self.given.items() if role == IGNORE}
        self._infer_action()
        self._infer_images()
        self._infer_state()
        for role, keys in ((PRIVILEGED, [f"observation.{PRIVILEGED}"]), (POINTS, self._clouds())):
            found = [key for key in keys if key in dataset.columns and self._is_free(key)]
            if len(found) == 1 and not self.keys(role) and self._observes(role):
                self.roles[found[0]] = role
        texts = [key for key in (TASK,) if any(dataset.texts[key][1])]
        if texts and self._is_free(TASK) and not self.keys(INSTRUCTION) and self._observes(INSTRUCTION, TASK):
            self.roles[TASK] = INSTRUCTION

    def keys(self, role: str) -> list[str]:
        return [key for key, own in self.roles.items() if own == role]

    @property
    def cameras(self) -> dict[str, str]:
        """Name of the camera -> key."""
        return {role.removeprefix(_IMAGE): key for key, role in self.roles.items() if role.startswith(_IMAGE)}

    @property
    def state_entries(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each part of the state, as in EnvSpec."""
        return tuple((_short(key), self.size(key)) for key in self.keys(STATE))

    def describe(self) -> Iterator[tuple[str, str]]:
        """(key, what becomes of it)."""
        offsets = dict.fromkeys((STATE, PRIVILEGED, ACTION), 0)
        position = [key for key in POSITION if key in self.dataset.columns and key not in self.roles]
        unused = [key for key in self.dataset.keys if key not in self.roles and key not in position]
        for key in [*self.roles, *unused]:
            role = self.roles.get(key)
            if role in offsets and len(self.keys(role)) > 1:
                first, size = offsets[role], self.size(key)
                offsets[role] += size
                role = f"{role}[{first}:{first + size}]"
            use = f" -> {role}" if role else f"; not used: {self._reason(key)}"
            yield key, f"{self._kind(key)}{use}".removeprefix("; ")
        if position:
            yield ", ".join(position), "the position of a step in the dataset, checked"

    def state_advice(self) -> str:
        """How to set the state, if it cannot be inferred."""
        vectors = self._vectors()
        found = ", ".join(f"{key} [{self.size(key)}]" for key in vectors) or "none"
        example = ", ".join(f"{key}: state" for key in vectors[:2]) or "KEY: state"
        return f"; vectors: {found}; set imitate.keys={{{example}}} in the order of the env's entries"

    def camera_advice(self, missing: list[str]) -> str:
        free = [key for key in self.dataset.cameras if key not in self.roles]
        if not free:
            return f"ignore it in the env, e.g. env.roles={{{missing[0]}: ignore}}"
        return f"set imitate.keys={{{free[0]}: image/{missing[0]}}}"

    def _refuse_unfit(self) -> None:
        dataset, path = self.dataset, self.dataset.path
        for key, role in self.given.items():
            shown = f"imitate.keys={{{key}: {role}}}"
            if key not in dataset.keys:
                raise DatasetError(f"{shown}: '{path}' has no such key; it has {', '.join(dataset.keys)}")
            if not _ROLE.fullmatch(role):
                expected = "image/NAME, state, points, privileged, instruction, action or ignore"
                raise DatasetError(f"{shown}: expected {expected}")
            if role == IGNORE:
                continue
            if key in dataset.unused:
                raise DatasetError(f"{shown}: this key cannot be read from '{path}': {dataset.unused[key]}")
            kind = role.partition("/")[0]
            is_cloud = key in dataset.columns and dataset.columns[key].ndim == 3
            fits = {"image": key in dataset.cameras, INSTRUCTION: key in dataset.texts, POINTS: is_cloud}
            if not fits.get(kind, key in dataset.columns and not is_cloud):
                expected = {"image": "images", INSTRUCTION: "texts", POINTS: "point clouds"}.get(kind, "vectors")
                raise DatasetError(f"{shown}: '{path}' has {self._kind(key)} there; expected {expected}")
        roles = [role for role in self.given.values() if role.startswith(_IMAGE) or role in (INSTRUCTION, POINTS)]
        if twice := [role for role in dict.fromkeys(roles) if roles.count(role) > 1]:
            both = [key for key, role in self.given.items() if role == twice[0]]
            raise DatasetError(f"imitate.keys: {' and '.join(both)} have the same role {twice[0]}; keep one of them")

    def _infer_action(self) -> None:
        columns = self.dataset.columns
        found = [key for key in _ACTIONS if key in columns and columns[key].ndim < 3 and self._is_free(key)]
        if not self.keys(ACTION) and found:
            self.roles[found[0]] = ACTION
        if not self.keys(ACTION):
            numbers = [key for key in columns if columns[key].ndim < 3 and key not in POSITION]
            raise DatasetError(
                f"'{self.dataset.path}' has no key {' or '.join(_ACTIONS)}; set imitate.keys={{KEY: action}} with one "
                f"of {', '.join(numbers) or 'its vectors, of which it has none'}"
            )

    def _infer_images(self) -> None:
        free = [key for key in self.dataset.cameras if self._is_free(key)]
        if self.spec is None:
            taken = set(self.roles.values())
            for key in free:
                if (role := f"{_IMAGE}{_short(key)}") in taken:
                    raise DatasetError(
                        f"'{self.dataset.path}': {key} is another {role}; set imitate.keys={{{key}: image/NAME}}"
                    )
                taken.add(role)
                self.roles[key] = role
            return
        wanted = [name for name in self.spec.observation if name.startswith(_IMAGE) and not self.keys(name)]
        # our cameras with different names have different views
        rules: list[Callable[[str], str]] = [_short]
        rules += [] if self.dataset.is_own else [lambda key: _CAMERA.sub("", _short(key))]
        for same in rules:
            for name in list(wanted):
                matching = [key for key in free if same(key) == same(name.removeprefix(_IMAGE))]
                if len(matching) == 1:
                    self.roles[matching[0]] = name
                    free.remove(matching[0])
                    wanted.remove(name)
        if len(wanted) == len(free) == 1 and not self.dataset.is_own:
            self.roles[free[0]] = wanted[0]

    def _infer_state(self) -> None:
        if self.keys(STATE) or not self._observes(STATE):
            return
        vectors = [key for key in self._vectors() if self._is_free(key)]
        if self.spec is None:
            self.roles |= dict.fromkeys(vectors, STATE)
            return
        sizes = {_short(key): (key, self.size(key)) for key in vectors}
        named = [sizes.get(name, ("", 0)) for name, _ in self.spec.state_entries]
        if named and [size for _, size in named] == [size for _, size in self.spec.state_entries]:
            self.roles |= {key: STATE for key, _ in named}
        elif _OWN_STATE in vectors or len(vectors) == 1:
            self.roles[_OWN_STATE if _OWN_STATE in vectors else vectors[0]] = STATE

    def _vectors(self) -> list[str]:
        """Vectors that are observations by their names, `observation.state` first."""
        found = [
            key
            for key, values in self.dataset.columns.items()
            if key.startswith(("observation.", "obs/")) or _short(key) == STATE
            if values.ndim < 3 and key != f"observation.{PRIVILEGED}"
        ]
        return sorted(found, key=lambda key: (key != _OWN_STATE, key))

    def _clouds(self) -> list[str]:
        return [key for key, values in self.dataset.columns.items() if values.ndim == 3 and key not in _ACTIONS]

    def _is_free(self, key: str) -> bool:
        return key not in self.given and key not in self.roles

    def _observes(self, *names: str) -> bool:
        return self.spec is None or any(name in self.spec.observation for name in names)

    def size(self, key: str) -> int:
        return math.prod(self.dataset.columns[key].shape[1:])

    def names(self, role: str) -> list[str]:
        """The names of the entries of a joined vector, each once; [] if they are unknown."""
        parts = {key: self.dataset.names.get(key, []) for key in self.keys(role)}
        if any(len(names) != self.size(key) for key, names in parts.items()):
            return []
        found = [name for names in parts.values() for name in names]
        if len(set(found)) < len(found):
            found = [f"{_short(key)}.{name}" for key, names in parts.items() for name in names]
        return found if len(set(found)) == len(found) else []

    def _kind(self, key: str) -> str:
        dataset = self.dataset
        if key in dataset.cameras:
            return "images {} x {}".format(*dataset.cameras[key].shape)
        if key in dataset.texts:
            return f"text, {len(np.unique(dataset.texts[key][0]))} different"
        if key in dataset.columns:
            return f"{dataset.columns[key].dtype} {list(dataset.columns[key].shape[1:])}"
        return ""

    def _reason(self, key: str) -> str:
        if key in self.reasons:
            return self.reasons[key]
        if key.startswith("next."):
            return "the result of an action; imitation does not need it"
        if key == TASK and not any(self.dataset.texts[TASK][1]):
            return "it is empty"
        if key in self.dataset.cameras:
            what = "no camera of the env has this name"
        elif key in self.dataset.texts or key in self._clouds() or key.startswith(f"observation.{PRIVILEGED}"):
            what = "the env does not observe it" if self.spec else "it is not an observation by its name"
        elif key in self._vectors():
            what = "not part of the env's state"
        else:
            what = "not an observation by its name"
        return f"{what}; imitate.keys can set its role"


def _short(key: str) -> str:
    """observation.images.top -> top, observation.state -> state, obs/agentview_image -> agentview_image."""
    bare = key.removeprefix("obs/").removeprefix("observation.").removeprefix("images.")
    return re.sub(r"[^A-Za-z0-9_.-]", "_", bare)
