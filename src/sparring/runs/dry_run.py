"""`--dry-run`: runs one rollout and one update and reports shapes, memory, speed and parity. Nothing is written."""

import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

from tensordict import TensorDict

from sparring.config.schema import Config
from sparring.errors import UserError
from sparring.phases.adversarial import Adversarial
from sparring.phases.finetune import Finetune
from sparring.phases.imitate import Imitate
from sparring.phases.phase import Phase
from sparring.phases.teacher import Teacher
from sparring.runs.run import Run


def dry_run(config: Config, only_rollout: bool = False) -> str:
    """Run one rollout and one update; return shapes, memory, speed and the parity of acting and scoring as text."""
    if only_rollout and config.phase in ("imitate", "teacher"):
        raise UserError(f"--dry-run rollout: there are no rollouts in {config.phase}; --dry-run alone tries one update")
    run = Run(config, folder=False, quiet=True)
    phase = run.phase
    explorer = phase.explorer if isinstance(phase, Adversarial) else phase
    try:
        if isinstance(phase, Imitate):
            what, lines = "one update", _imitation(phase)
        elif isinstance(phase, Teacher) or (isinstance(phase, Adversarial) and not only_rollout):
            what = "a few episodes, one update" if isinstance(phase, Teacher) else "one rollout, one update of each"
            # episodes are stored in a temporary folder, not in the run folder
            with tempfile.TemporaryDirectory() as folder:
                phase.replay.folder = Path(folder)
                lines = _teacher(phase) if isinstance(phase, Teacher) else _adversarial(phase)
                phase.close()
        else:
            assert isinstance(explorer, Finetune)
            what = "one rollout" if only_rollout else "one rollout, one update"
            lines = (_rollout if only_rollout else _rollout_and_update)(explorer)
    finally:
        phase.env.close()
    head = f"dry run of '{config.phase}' on {run.distributed.device}: {what}, nothing written"
    return "\n".join([*filter(None, [run.distributed.lacks_gpus]), head, *lines])


def _rollout_and_update(phase: Finetune) -> list[str]:
    metrics, rollout = phase.step(0.0), phase.buffer.rollout()
    # `collected` may include an earlier rollout that fitted normalisers
    collected, learned_from = phase.progress.env_steps, int(rollout["next", "executed"].sum())
    return [
        *_measured(phase, rollout, phase.buffer.bytes(), "rollout"),
        f"speed: {collected / metrics['collect_seconds']:,.0f} env steps/s collecting, "
        f"{metrics['update_seconds']:.2f} s for the update of {learned_from:,} steps (first calls, warm-up included)",
        f"parity: {metrics['parity']:.3g}",
    ]


def _rollout(phase: Finetune) -> list[str]:
    """Check that robots and policy work together, like ManiFlow's test_rl_rollout.py. Rewards are those of the env."""
    started = time.perf_counter()
    phase.collect()
    rate, episodes = phase.collector.env_steps / (time.perf_counter() - started), phase.collector.drain_episodes()
    ended = f"episodes: {len(episodes)} ended"
    if episodes:
        ended += f", mean reward {fmean(e.reward for e in episodes):.3g}, {sum(e.success for e in episodes)} successes"
    lines = _measured(phase, phase.buffer.rollout(), phase.buffer.bytes(), "rollout")
    return [*lines, f"speed: {rate:,.0f} env steps/s collecting (first calls, warm-up included)", ended]


def _imitation(phase: Imitate) -> list[str]:
    batch = next(phase.batches)
    metrics = phase.step(0.0)
    rate = phase.config.steps_per_update / metrics["update_seconds"]
    return [
        f"demonstrations: {phase.learns_from}",
        *_measured(phase, batch, batch.bytes(), "batch"),
        f"speed: {rate:,.1f} gradient steps/s (first calls, warm-up included)",
        f"loss: {metrics['loss']:.3g}",
    ]


def _teacher(phase: Teacher) -> list[str]:
    metrics = phase.step(0.0)
    steps, rate = phase.progress.env_steps, phase.config.gradient_steps / metrics["update_seconds"]
    return [
        *_measured(phase, next(phase.replay.batches), phase.replay.store.bytes(), "episodes"),
        f"speed: {steps / metrics['collect_seconds']:,.0f} env steps/s collecting, "
        f"{rate:,.1f} gradient steps/s (first calls, warm-up included)",
        f"loss: {metrics['loss']:.3g}",
    ]


def _adversarial(phase: Adversarial) -> list[str]:
    metrics = phase.step(0.0)
    lines = _measured(phase, phase.explorer.buffer.rollout(), phase.replay.store.bytes(), "episodes")
    # some metrics are absent while only the world model warms up, or before an episode has ended
    shown = {"parity": "parity: {:.3g}", "wm_loss": "loss: {:.3g}"}
    return lines + [text.format(metrics[name]) for name, text in shown.items() if name in metrics]


def _measured(phase: Phase, td: TensorDict, stored: int, what: str) -> list[str]:
    """Report the shapes in `td` and the memory use."""
    lines = ["shapes:"]
    for key, value in sorted(td.items(True, True), key=lambda item: str(item[0])):
        name = "/".join(key) if isinstance(key, tuple) else key
        lines.append(f"  {name:28} {str(list(value.shape)):24} {str(value.dtype).removeprefix('torch.')}")
    parameters = sum(p.numel() for p in phase.model.parameters())
    # peak memory of this process, in MiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    memory = f"{stored / 2**20:.3g} MiB of {what}, {peak:.0f} MiB peak"
    return [*lines, f"memory: {parameters:,} parameters, {memory}"]
