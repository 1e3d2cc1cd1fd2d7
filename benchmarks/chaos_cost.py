"""What does the verification of checkpoints cost? A save and a load of 1 GB, with and without it, in turns.

- `alone`: weights only; `with moments`: weights are a third of the bytes, Adam's two moments are the rest
- `save`: as in a run, into the work folder (--work selects the disk); `load`: find the checkpoint, load weights and
  state into a model, with every file in the page cache. A process verifies a checkpoint once, which each load includes
- `read`: the bytes of the same files into memory; an unverified load of weights maps them instead, and reads less
- seconds are minima over the rounds, as other programs may use the machine. `save ratio`: with / without, target 1.1;
  `load ratio`: with / `read`, target 2; `load to mapped`: load with / load without, no target

No verdict is bad: a busy machine misses targets.
"""

import argparse
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from sparring.contract import EnvSpec
from sparring.processes.manifest import HashedFile
from sparring.runs import checkpoint as checkpoints
from sparring.runs import fits

CASES, BAD = ("alone", "with moments"), ()
SPEC = EnvSpec({"state": ((3,), "float32")}, 2)


def model_of(size: float) -> nn.Module:
    """A model of `size` bytes, in eight layers."""
    width = int((size / 8 / 4) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))


def state_of(model: nn.Module, moments: bool) -> dict:
    own = {
        n: {"exp_avg": torch.rand_like(p), "exp_avg_sq": torch.rand_like(p)} for n, p in enumerate(model.parameters())
    }
    return {"phase": {"optimizer": {"state": own if moments else {}}}}


class UnhashedFile(HashedFile):
    """Writes like HashedFile, without hashing."""

    def __init__(self, file: Path):
        super().__init__(file)
        self._digest = mock.Mock(**{"hexdigest.return_value": ""})


def unverified() -> ExitStack:
    stack = ExitStack()
    stack.enter_context(mock.patch.object(checkpoints, "HashedFile", UnhashedFile))
    stack.enter_context(mock.patch.object(checkpoints, "_damage", lambda checkpoint: []))
    for module in (checkpoints, fits):
        stack.enter_context(mock.patch.object(module, "not_finite", lambda *_: None))
    return stack


def save(folder: Path, model: nn.Module, state: dict) -> None:
    with ThreadPoolExecutor(max_workers=1) as thread:
        checked = thread.submit(checkpoints.not_finite, model, model.state_dict(), state["phase"])
        checkpoints.save_checkpoint(folder, 1, model, state, "seed: 1\n", SPEC, lambda: expect_finite(checked.result()))


def expect_finite(unfit: str | None) -> None:
    assert unfit is None, unfit


def load(folder: Path, model: nn.Module) -> None:
    checkpoints._verified.clear()
    fits.load_weights(model, folder)
    state = checkpoints.load_training_state(checkpoints.find_checkpoint(folder))
    fits.not_finite(nn.Module(), {}, state["phase"])


def read(folder: Path) -> None:
    for file in folder.glob("checkpoint-1/*"):
        file.read_bytes()


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)


def trials(name: str, args: argparse.Namespace, work: Path) -> Iterator[dict]:
    moments, size = name == "with moments", args.gigabytes * 1e9
    model = model_of(size / 3 if moments else size)
    state = state_of(model, moments)
    for _ in range(args.rounds):
        trial: dict = {"verdict": "measured", "of": args.rounds}
        for way in ("without", "with"):
            folder = work / name / way
            with unverified() if way == "without" else ExitStack():
                trial[f"save {way}"] = seconds(partial(save, folder, model, state))
                trial[f"load {way}"] = seconds(partial(load, folder, model))
            if way == "with":
                trial["read"] = seconds(partial(read, folder))
            shutil.rmtree(folder)
        yield trial


def summary(trials: list[dict]) -> dict:
    rounds = {key: [round(t[key], 3) for t in trials] for key in trials[0] if key not in ("verdict", "of")}
    best = {key: min(values) for key, values in rounds.items()}
    compared = {"save ratio": ("save with", "save without"), "load ratio": ("load with", "read")}
    compared["load to mapped"] = ("load with", "load without")
    ratios = {key: round(best[above] / best[below], 3) for key, (above, below) in compared.items()}
    return best | ratios | {"rounds": rounds}
