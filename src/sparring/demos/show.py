"""A look into a dataset, in words and as a contact sheet, and pictures of the built-in tasks."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from sparring.data.demonstrations import Demonstrations
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.tasks.registry import TASKS
from sparring.record.console import clock

_EPISODES, _MOMENTS = 6, 5


def summary(demos: Demonstrations) -> Iterator[str]:
    """Lines for a person to read."""
    info, extras = demos.dataset.info, demos.dataset.extras
    seconds = demos.steps / demos.fps
    yield f"episodes   {len(demos):,} of {demos.lengths.min()} to {demos.lengths.max()} steps"
    yield f"steps      {demos.steps:,} at {demos.fps} a second: {clock(seconds)} ({seconds / 3600:.2f} h)"
    yield f"robot      {info.get('robot_type') or 'not said'}, control mode {demos.control_mode or 'not said'}"
    for camera, (height, width) in demos.image_shapes.items():
        yield f"camera     {camera}, {height} x {width}"
    yield f"state      {demos.state_dim} entries"
    yield f"action     {demos.action_dim} entries"
    if demos.points:
        yield f"points     {demos.points} a step: x, y, z, r, g, b"
    yield f"successes  {_successes(demos)}"
    if extras:
        tried = f"{len(demos):,} episodes kept of {extras['episodes_tried']:,} tried"
        yield f"recorded   {tried}, noise {extras['noise']:g}, seed {extras['seed']}"
        for task, count in Counter(extras["episode_tasks"]).items():
            yield f"task       {task}: {count:,} episodes"
    for text, count in Counter(demos.instruction(episode) for episode in range(len(demos))).most_common():
        yield f"phrasing   {text!r}: {count:,} episodes"
    yield from _action_table(demos)


def moments(demos: Demonstrations) -> list[list[tuple[str, np.ndarray]]]:
    """Rows of (caption, picture) for a contact sheet: a row for each of a few episodes, moments of all cameras."""
    episodes = np.unique(np.linspace(0, len(demos) - 1, _EPISODES).round().astype(int))
    return [_row(demos, int(episode)) for episode in episodes]


def _row(demos: Demonstrations, episode: int) -> list[tuple[str, np.ndarray]]:
    steps = np.linspace(0, demos.lengths[episode] - 1, _MOMENTS).round().astype(int)
    row = []
    for camera in demos.cameras:
        # [T, 3, H, W] -> [T, H, W, 3]
        frames = demos.images(camera, episode).transpose(0, 2, 3, 1)
        for number, step in enumerate(steps):
            caption = f"{episode}: {camera} {step}" if number == 0 else str(step)
            row.append((caption, _enlarged(frames[step])))
    return row


def _enlarged(picture: np.ndarray) -> np.ndarray:
    """At least as large as a caption is long."""
    times = max(128 // picture.shape[1], 1)
    return picture.repeat(times, axis=0).repeat(times, axis=1)


def _successes(demos: Demonstrations) -> str:
    if "next.success" not in demos.dataset.columns:
        return "not said"
    ends = demos.numbers("next.success")[demos.starts[1:] - 1]
    return f"{int(ends.sum()):,} of {len(demos):,} episodes ({ends.mean():.1%})"


def _action_table(demos: Demonstrations) -> Iterator[str]:
    found = demos.statistics["action"]
    said = demos.dataset.info["features"]["action"].get("names")
    labels = said if isinstance(said, list) and len(said) == demos.action_dim else range(demos.action_dim)
    columns = ("mean", "std", "min", "q01", "q99", "max")
    yield f"{'action entry':24}" + "".join(f"{name:>9}" for name in columns)
    for entry, label in enumerate(labels):
        yield f"  {label!s:22}" + "".join(f"{float(found[name].ravel()[entry]):9.3f}" for name in columns)


# ---- how each built-in task begins, and how it looks when its scripted expert is done

# where experts do best: hands that can turn
CONTROL = "delta_ee"


def task_rows(seed: int = 0) -> list[list[tuple[str, np.ndarray]]]:
    """One row for each task: the start of each of its distributions, then d0 done."""
    names = dict.fromkeys(name.rsplit("_d", 1)[0] for name in TASKS)
    return [_task_row([name for name in TASKS if name.rsplit("_d", 1)[0] == stem], seed) for stem in names]


def start_and_end(task: str, seed: int = 0, **config) -> tuple[np.ndarray, np.ndarray]:
    """What the head camera sees of one episode, at its start and after its expert has played it."""
    from sparring.envs.tabletop.experts import Expert

    env = Tabletop(TabletopConfig(task=(task,), control_mode=CONTROL, threads=1, **config), 1)
    env.reset(EpisodeSeeds(seed, "eval"))
    start = end = head(env.render(0))
    if TASKS[task].expert is not None:
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


def _task_row(tasks: list[str], seed: int) -> list[tuple[str, np.ndarray]]:
    if len(tasks) == 1:
        # one distribution only: several of its starts
        return [(tasks[0], start_and_end(tasks[0], seed + k)[0]) for k in range(4)]
    pictures = {task: start_and_end(task, seed) for task in tasks}
    done = pictures[tasks[0]][1]
    return [(task, start) for task, (start, _) in pictures.items()] + [(f"{tasks[0]}, done", done)]
