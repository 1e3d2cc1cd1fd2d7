"""`sparring prune`: of a run's checkpoints, the best and the last stay."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from sparring.checkpoint import checkpoints
from sparring.errors import UserError
from sparring.folder import alone_in
from sparring.runs import is_held, json_lines, size_of


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
    """Only looks. The best are those whose evaluation, at that update or the next one after it, told the best."""
    if not run.is_dir():
        raise UserError(f"'{run}' is no folder; give a run folder")
    if is_held(run):
        raise UserError(f"'{run}': a process is training there; wait until it is done, or leave it out")
    found = checkpoints(run)
    if not found:
        raise UserError(f"'{run}' holds no checkpoint-<n> folder; give a run folder")
    measure, told = _evaluated(run)
    rates = {path: rate for path in found if (rate := _rate_of(path, told)) is not None}
    # of equals the newest, which is nearest to what was evaluated
    best = sorted(rates, key=lambda path: (measure.sign * rates[path], _update(path)), reverse=True)[:keep_best]
    kept = {path: "last" for path in found[-keep_last:]} | {path: measure.words.format(rates[path]) for path in best}
    # and what a save left that was cut short
    removed = [*run.glob(".partial-checkpoint-*"), *(path for path in found if path not in kept)]
    kept = {path: kept[path] for path in found if path in kept}
    return Pruning(run, kept, {path: size_of(path) for path in removed}, bool(rates))


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


def _rate_of(checkpoint: Path, told: list[tuple[int, float]]) -> float | None:
    """None where no evaluation followed."""
    return next((rate for update, rate in told if update >= _update(checkpoint)), None)


def _update(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
