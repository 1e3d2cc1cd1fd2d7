"""`sparring prune`: of a run's checkpoints, keep the best and the last."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from sparring.errors import UserError
from sparring.processes.files import is_held
from sparring.processes.rows import RowFile
from sparring.runs.checkpoint import checkpoints, damage_of, newest_whole
from sparring.runs.folder import folder_lock
from sparring.runs.listing import size_of, why_no_checkpoint


class _Measure(NamedTuple):
    name: str  # how it ends in evaluations.jsonl
    sign: int  # 1: more is better, -1: less
    text: str


# what ranks checkpoints: the first that a run has; the last one is of world models
_MEASURES = (
    _Measure("eval/success_rate", 1, "success {:.0%}"),
    _Measure("eval/reward", 1, "reward {:.4g}"),
    _Measure("/changed_mse_ratio", -1, "MSE ratio {:.3f}"),
)


@dataclass(frozen=True)
class Pruning:
    """What is to become of a run's checkpoints."""

    run: Path
    kept: dict[Path, str]  # and why
    removed: dict[Path, int]  # and how many bytes each has
    rated: bool  # whether evaluations say which are best

    @classmethod
    def plan(cls, run: Path, keep_best: int, keep_last: int) -> "Pruning":
        """Removes nothing. Checkpoints rank by the latest evaluation at their update or before. Those that are kept are
        whole; damaged ones after the newest of these are left alone."""
        if not run.is_dir():
            raise UserError(f"'{run}' is no folder; give a run folder")
        if is_held(run):
            raise UserError(f"'{run}': a process is training there; wait until it is done, or leave it out")
        last_whole, found = newest_whole(run), checkpoints(run)
        if last_whole is None:
            raise UserError(why_no_checkpoint(run) or f"'{run}' holds no checkpoint-<n> folder; give a run folder")
        found = found[: found.index(last_whole) + 1]
        measure, evaluations = _evaluations(run)
        rated: dict[Path, tuple[tuple, str]] = {}  # rank, and why it is kept
        for path in found:
            update = int(path.name.rpartition("-")[2])
            if newest := max((one for one in evaluations if one[0] <= update), default=None):
                evaluated, figure = newest
                # of equals the one nearest to what was evaluated, then the newest
                rank = measure.sign * figure, evaluated - update, evaluated
                earlier = f" at update {evaluated}" if evaluated != update else ""
                rated[path] = rank, measure.text.format(figure) + earlier
        ranked = sorted(rated, key=lambda path: rated[path][0], reverse=True)
        best, last = (_whole(paths, most) for paths, most in ((ranked, keep_best), (reversed(found), keep_last)))
        kept = {path: "last" for path in last} | {path: rated[path][1] for path in best}
        # also what an interrupted save left
        removed = [*run.glob(".partial-checkpoint-*"), *(path for path in found if path not in kept)]
        kept = {path: kept[path] for path in found if path in kept}
        return cls(run, kept, {path: size_of(path) for path in removed}, bool(rated))

    @property
    def bytes(self) -> int:
        return sum(self.removed.values())

    def carry_out(self) -> None:
        """Holds the run's lock: nobody can begin to train there meanwhile."""
        with folder_lock(self.run):
            for path in self.removed:
                # interrupted, it must not look like a checkpoint
                gone = path.with_name(f".partial-{path.name.removeprefix('.partial-')}")
                os.replace(path, gone)
                shutil.rmtree(gone)


def _whole(paths: Iterable[Path], most: int) -> list[Path]:
    """The first of them that are not damaged; no more are read."""
    return list(islice((path for path in paths if not damage_of(path)), most))


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e300


def _evaluations(run: Path) -> tuple[_Measure, list[tuple[int, float]]]:
    """The first measure that any evaluation has; (update, figure) of each, in order."""
    rows = [row for row in RowFile(run / "evaluations.jsonl").read() if isinstance(row.get("update"), int)]
    for measure in _MEASURES:
        figures = ((row["update"], [row[name] for name in row if name.endswith(measure.name)]) for row in rows)
        # of several cameras, their mean
        evaluations = [(update, fmean(found)) for update, found in figures if found and all(map(_is_figure, found))]
        if evaluations:
            return measure, sorted(evaluations)
    return _MEASURES[0], []
