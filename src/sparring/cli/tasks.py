"""`sparring tasks`."""

from pathlib import Path

import numpy as np

from sparring.cli.arguments import OPTIONS
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.tasks.registry import TASKS

# ---- Pictures of the built-in tasks: how each begins, and how it looks when its scripted expert is done.


# where experts do best: hands that can turn
CONTROL = "delta_ee"


def task_rows(seed: int = 0) -> list[list[tuple[str, np.ndarray]]]:
    """One row for each task: the start of each of its distributions, then d0 done."""
    names = dict.fromkeys(name.rsplit("_d", 1)[0] for name in TASKS)
    return [_row([name for name in TASKS if name.rsplit("_d", 1)[0] == stem], seed) for stem in names]


def start_and_end(task: str, seed: int = 0, **config) -> tuple[np.ndarray, np.ndarray]:
    """What the head camera sees of one episode, at its start and after its expert has played it."""
    from sparring.envs.tabletop.experts import EXPERTS, Expert

    env = Tabletop(TabletopConfig(task=(task,), control_mode=CONTROL, threads=1, **config), 1)
    env.reset(EpisodeSeeds(seed, "eval"))
    start = end = head(env.render(0))
    if type(TASKS[task]) in EXPERTS:
        expert = Expert(env)
        # the step that ends an episode begins the next one
        for _ in range(env.spec.max_episode_steps - 1):
            env.step(expert())
        end = head(env.render(0))
    env.close()
    return start, end


def head(picture: np.ndarray) -> np.ndarray:
    """Of all cameras side by side, the first."""
    return picture[:, : picture.shape[0]]


def _row(tasks: list[str], seed: int) -> list[tuple[str, np.ndarray]]:
    if len(tasks) == 1:
        # one distribution only: several of its starts
        return [(tasks[0], start_and_end(tasks[0], seed + k)[0]) for k in range(4)]
    pictures = {task: start_and_end(task, seed) for task in tasks}
    done = pictures[tasks[0]][1]
    return [(task, start) for task, (start, _) in pictures.items()] + [(f"{tasks[0]}, done", done)]


def add(commands) -> None:
    tasks = commands.add_parser("tasks", help="list the built-in tasks and their ranges", **OPTIONS)
    tasks.add_argument("--sheet", metavar="PNG", help="draw them all into this picture instead")
    tasks.set_defaults(command=_tasks)


def _tasks(arguments, overrides) -> int:
    from sparring.envs.tabletop.tasks.registry import describe

    if arguments.sheet:
        from sparring.record.overlay import contact_sheet, write_png

        print(write_png(Path(arguments.sheet), contact_sheet(task_rows())))
        return 0
    rows = [("task", "goal", "ranges"), *describe()]
    widths = [max(len(str(row[i])) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
