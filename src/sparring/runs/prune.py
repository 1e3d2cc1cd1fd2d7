"""`sparring prune`: delete the checkpoints of a run except the best and the last ones."""

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
    name: str  # end of its name in evaluations.jsonl
    sign: int  # 1: higher is better, -1: lower is better
    text: str


# checkpoints are ranked by the first of these that the run has; the last one is for world models
_MEASURES = (
    _Measure("eval/success_rate", 1, "success {:.0%}"),
    _Measure("eval/reward", 1, "reward {:.4g}"),
    _Measure("eval/action_error_ratio", -1, "action error {:.3f}"),
    _Measure("/changed_mse_ratio", -1, "MSE ratio {:.3f}"),
)


@dataclass(frozen=True)
class Pruning:
    """A plan: which checkpoints of a run to keep and which to delete."""

    run: Path
    kept: dict[Path, str]  # checkpoint -> reason
    removed: dict[Path, int]  # checkpoint -> size in bytes
    rated: bool  # whether evaluations rank the checkpoints

    @classmethod
    def plan(cls, run: Path, keep_best: int, keep_last: int) -> "Pruning":
        """Plan the deletion; deletes nothing. A checkpoint ranks by the latest evaluation at or before its update.

        Only intact checkpoints count as kept; damaged ones after the newest intact one are not touched."""
        if not run.is_dir():
            raise UserError(f"'{run}' is not a folder; give a run folder")
        if is_held(run):
            raise UserError(f"'{run}': a process is training there; wait until it is done, or omit this folder")
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
                # ties: the checkpoint nearest to its evaluation ranks first, then the newest
                rank = measure.sign * figure, evaluated - update, evaluated
                earlier = f" at update {evaluated}" if evaluated != update else ""
                rated[path] = rank, measure.text.format(figure) + earlier
        ranked = sorted(rated, key=lambda path: rated[path][0], reverse=True)
        best, last = (_whole(paths, most) for paths, most in ((ranked, keep_best), (reversed(found), keep_last)))
        kept = {path: "last" for path in last} | {path: rated[path][1] for path in best}
        # also leftovers of interrupted saves
        removed = [*run.glob(".partial-checkpoint-*"), *(path for path in found if path not in kept)]
        kept = {path: kept[path] for path in found if path in kept}
        return cls(run, kept, {path: size_of(path) for path in removed}, bool(rated))

    @property
    def bytes(self) -> int:
        return sum(self.removed.values())

    def carry_out(self) -> None:
        """Delete as planned. The lock of the run is held, so that no training can start in it."""
        with folder_lock(self.run):
            for path in self.removed:
                # renamed first: an interrupted deletion must not look like a checkpoint
                gone = path.with_name(f".partial-{path.name.removeprefix('.partial-')}")
                os.replace(path, gone)
                shutil.rmtree(gone)


def _whole(paths: Iterable[Path], most: int) -> list[Path]:
    """The first `most` intact paths; later ones are not read."""
    return list(islice((path for path in paths if not damage_of(path)), most))


def _is_usable(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e300


def _evaluations(run: Path) -> tuple[_Measure, list[tuple[int, float]]]:
    """The first measure that an evaluation has, and its (update, figure) pairs in order."""
    rows = [row for row in RowFile(run / "evaluations.jsonl").read() if isinstance(row.get("update"), int)]
    for measure in _MEASURES:
        figures = ((row["update"], [row[name] for name in row if name.endswith(measure.name)]) for row in rows)
        # the mean over cameras
        evaluations = [(update, fmean(found)) for update, found in figures if found and all(map(_is_usable, found))]
        if evaluations:
            return measure, sorted(evaluations)
    return _MEASURES[0], []
