"""EpisodeRecorder: transitions [N] in, whole episodes of each env out into a store."""

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict

from sparring.data.episodes import EpisodeStore


class EpisodeRecorder:
    """`add` every transition as `Collector.decide` returns it; each episode is appended to the store when it ends.

    A transition is kept as it is, without a copy, until its episodes have ended: do not write into it. An episode whose
    first step was not seen is left out. `seeds(env, episode)` tells the seed of an env's k-th episode, `tasks` are the
    instructions that `observation/task` indexes; both, `source` and the success are noted with the episode. `exclude`:
    keys that acting and scoring need and nobody trains on later.
    """

    def __init__(
        self,
        store: EpisodeStore,
        num_envs: int,
        source: str = "",
        tasks: Sequence[str] = (),
        seeds: Callable[[int, int], int] | None = None,
        exclude: Sequence[str] = ("noise", "trace"),
    ):
        self.store, self.num_envs, self.source = store, num_envs, source
        self.tasks, self.seeds, self.exclude = tuple(tasks), seeds, tuple(exclude)
        # the latest transitions, as far back as the oldest episode that goes on; `next/observation` is left out
        self._steps: list[TensorDict] = []
        # of each env: where in these its episode began (-1: not seen), and how many began before
        self._first = [-1] * num_envs
        self._episode = [-1] * num_envs

    def add(self, td: TensorDict) -> None:
        td = td.exclude(*self.exclude).cpu()
        for env in td["is_first"].nonzero()[:, 0].tolist():
            self._first[env] = len(self._steps)
            self._episode[env] += 1
        last = td["next", "observation"]
        self._steps.append(td.exclude(("next", "observation")))
        ended = td["next", "terminated"] | td["next", "truncated"]
        for env in ended.nonzero()[:, 0].tolist():
            if self._first[env] >= 0:
                self._append(env, last[env])
            self._first[env] = -1
        if ended.any():
            # drop the transitions that lie before every episode that goes on
            oldest = min((first for first in self._first if first >= 0), default=len(self._steps))
            del self._steps[:oldest]
            self._first = [first - oldest if first >= 0 else -1 for first in self._first]

    def state_dict(self) -> dict:
        """The episodes that are under way."""
        steps = [step.clone().to_dict() for step in self._steps]
        return {"steps": steps, "first": list(self._first), "episode": list(self._episode)}

    def load_state_dict(self, state: dict) -> None:
        self._steps = [TensorDict(step, [self.num_envs]) for step in state["steps"]]
        self._first, self._episode = list(state["first"]), list(state["episode"])

    def _append(self, env: int, last: TensorDict) -> None:
        steps = self._steps[self._first[env] :]
        episode = TensorDict({}, [len(steps)])
        for key in steps[0].keys(True, True):
            rows = [step.get(key)[env] for step in steps]
            if key[0] != "observation":
                episode.set(key, torch.stack(rows))
                continue
            # [T+1, ...]: the only copy of the images before they are written
            whole = torch.stack([*rows, last.get(key[1:])])
            episode.set(key, whole[:-1])
            episode.set(("next", *key), whole[1:])
        info = {"source": self.source, "success": bool(episode["next", "success"][-1])}
        task = episode.get(("observation", "task"), None)
        if self.tasks:
            info["task"] = self.tasks[0 if task is None else int(task[0])]
        if self.seeds is not None:
            info["seed"] = int(self.seeds(env, self._episode[env]))
        self.store.append(episode, **info)
