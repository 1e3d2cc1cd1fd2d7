"""`sparring prune`: of a run's checkpoints, the best and the last stay."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from sparring.checkpoint import checkpoints
from sparring.errors import UserError
from sparring.folder import alone_in
from sparring.runs import is_held, json_lines, size_of


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
    """Only looks. The best are those whose evaluation, at that update or the next one after it, had most success."""
    if not run.is_dir():
        raise UserError(f"'{run}' is no folder; give a run folder")
    if is_held(run):
        raise UserError(f"'{run}': a process is training there; wait until it is done, or leave it out")
    found = checkpoints(run)
    if not found:
        raise UserError(f"'{run}' holds no checkpoint-<n> folder; give a run folder")
    rates = {path: rate for path, rate in zip(found, map(_rating(run), found), strict=True) if rate is not None}
    # of equals the newest, which is nearest to what was evaluated
    best = sorted(rates, key=lambda path: (rates[path], _update(path)), reverse=True)[:keep_best]
    kept = {path: "last" for path in found[-keep_last:]} | {path: f"success {rates[path]:.0%}" for path in best}
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


def _rating(run: Path):
    """Checkpoint -> success rate, or None where no evaluation followed."""
    told = [(line["update"], line.get("eval/success_rate")) for line in json_lines(run / "evaluations.jsonl")]
    told = sorted((update, rate) for update, rate in told if rate is not None)
    return lambda path: next((rate for update, rate in told if update >= _update(path)), None)


def _update(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
