"""What the benchmarks of explorers share: training for so many CPU minutes on one thread, in pieces if need be."""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import report  # noqa: E402

RUNS = report.RESULTS.parent / "runs" / "phases"
# of an update, what is kept
CURVES = ("reward/", "episode_reward", "contact_share", "wm_", "entropy", "explained_variance")


def student_config(teacher: Path, folder: Path, seed: int, changes: list[str]):
    from sparring.config_text import parse_overrides
    from sparring.inherit import with_inherited
    from sparring.tree import load_config

    fixed = ["phase=student", f"student.teacher={teacher}", f"seed={seed}", f"output={folder}"]
    fixed += ["device=cpu", "threads=1", "env.threads=1"]
    return load_config(None, with_inherited(parse_overrides([*fixed, *changes])))


def train(config, minutes: float) -> tuple:
    """(run, record): to the config's end, or until this process has computed for so many minutes."""
    import torch

    from sparring.run import Run

    torch.set_num_threads(1)
    run = Run(config, quiet=True)
    log = config.run_folder / "judged.json"
    record = json.loads(log.read_text()) if log.is_file() else {"cpu_seconds": 0.0, "curve": []}
    deadline = time.process_time() + 60 * minutes
    while run.fraction < 1 and time.process_time() < deadline:
        started = time.process_time()
        metrics = run.phase.step(run.fraction)
        record["cpu_seconds"] += time.process_time() - started
        point = {name: round(value, 5) for name, value in metrics.items() if name.startswith(CURVES)}
        record["curve"].append({"steps": run.phase.progress.env_steps} | point)
        if run.phase.progress.updates % config.training.save_every == 0:
            run.save()
            report.write_json(log, record)
            print(record["curve"][-1], flush=True)
    run.save()
    report.write_json(log, record)
    return run, record | {"steps": run.phase.progress.env_steps, "done": run.fraction >= 1}


def rise(curve: list[dict], name: str, share: float = 0.2) -> dict:
    """Mean of the first and of the last updates."""
    values = [point[name] for point in curve if name in point]
    count = max(1, int(len(values) * share))
    return {"first": sum(values[:count]) / count, "last": sum(values[-count:]) / count}
