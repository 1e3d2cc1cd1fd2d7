"""`sparring prune`: of a run's checkpoints, the best and the last stay."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from sparring.errors import UserError
from sparring.runs.checkpoint import checkpoints
from sparring.runs.folder import alone_in
from sparring.runs.listing import is_held, json_lines, size_of, why_no_checkpoint


class Measure(NamedTuple):
    """How its name in evaluations.jsonl ends, whether more (1) or less (-1) of it is better, and how it is said."""

    name: str
    sign: int
    words: str


# what tells the best, the first that a run has; the last one is of world models
MEASURES = (
    Measure("eval/success_rate", 1, "success {:.0%}"),
    Measure("eval/reward", 1, "reward {:.4g}"),
    Measure("/changed_mse_ratio", -1, "MSE ratio {:.3f}"),
)


@dataclass(frozen=True)
class Pruning:
    """What is to become of a run's checkpoints."""

    run: Path
    # and why
    kept: dict[Path, str]
    # and how many bytes each has
    removed: dict[Path, int]
    # whether evaluations told which were best
    rated: bool

    @property
    def bytes(self) -> int:
        return sum(self.removed.values())


def plan(run: Path, keep_best: int, keep_last: int) -> Pruning:
    """Only looks. The best are those whose evaluation, at that update or the last one before it, told the best."""
    if not run.is_dir():
        raise UserError(f"'{run}' is no folder; give a run folder")
    if is_held(run):
        raise UserError(f"'{run}': a process is training there; wait until it is done, or leave it out")
    found = checkpoints(run)
    if not found:
        raise UserError(why_no_checkpoint(run) or f"'{run}' holds no checkpoint-<n> folder; give a run folder")
    measure, told = _evaluated(run)
    rated = {path: rating for path in found if (rating := _rating_of(path, told))}
    best = sorted(rated, key=lambda path: _rank(path, *rated[path], measure), reverse=True)[:keep_best]
    kept = {path: "last" for path in found[-keep_last:]} | {path: _said(path, *rated[path], measure) for path in best}
    # and what a save left that was cut short
    removed = [*run.glob(".partial-checkpoint-*"), *(path for path in found if path not in kept)]
    kept = {path: kept[path] for path in found if path in kept}
    return Pruning(run, kept, {path: size_of(path) for path in removed}, bool(rated))


def carry_out(pruning: Pruning) -> None:
    """Nobody can begin to train there meanwhile."""
    with alone_in(pruning.run):
        for path in pruning.removed:
            # cut short, it must not look like a checkpoint
            gone = path.with_name(f".partial-{path.name.removeprefix('.partial-')}")
            os.replace(path, gone)
            shutil.rmtree(gone)


def _evaluated(run: Path) -> tuple[Measure, list[tuple[int, float]]]:
    """By the first measure that any evaluation has: update and figure of each, in order."""
    lines = list(json_lines(run / "evaluations.jsonl"))
    for measure in MEASURES:
        figures = ((line["update"], [line[name] for name in line if name.endswith(measure.name)]) for line in lines)
        # of several cameras, their mean
        told = [(update, fmean(found)) for update, found in figures if found and None not in found]
        if told:
            return measure, sorted(told)
    return MEASURES[0], []


def _rating_of(checkpoint: Path, told: list[tuple[int, float]]) -> tuple[int, float] | None:
    """Update and figure of the newest evaluation until then; None where there was none."""
    return max((rating for rating in told if rating[0] <= _update(checkpoint)), default=None)


def _rank(checkpoint: Path, update: int, figure: float, measure: Measure) -> tuple[float, int, int]:
    """Of equals the one nearest to what was evaluated, then the newest."""
    return measure.sign * figure, update - _update(checkpoint), update


def _said(checkpoint: Path, update: int, figure: float, measure: Measure) -> str:
    earlier = f" at update {update}" if update != _update(checkpoint) else ""
    return measure.words.format(figure) + earlier


def _update(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
