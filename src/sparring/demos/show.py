"""A look into a dataset, in words and as a contact sheet, and pictures of the built-in tasks."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from sparring.data.demonstrations import Demonstrations
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.experts import Expert
from sparring.envs.tabletop.tasks.registry import TASKS
from sparring.record.log import clock

_EPISODES, _MOMENTS = 6, 5  # of a contact sheet


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
    if "next.success" in demos.dataset.columns:
        success = demos.numbers("next.success")[demos.starts[1:] - 1]
        yield f"successes  {int(success.sum()):,} of {len(demos):,} episodes ({success.mean():.1%})"
    else:
        yield "successes  not said"
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
    rows = []
    for episode in np.unique(np.linspace(0, len(demos) - 1, _EPISODES).round().astype(int)).tolist():
        steps = np.linspace(0, demos.lengths[episode] - 1, _MOMENTS).round().astype(int)
        row = []
        for camera in demos.cameras:
            frames = demos.images(camera, episode).transpose(0, 2, 3, 1)  # [T, H, W, 3]
            times = max(128 // frames.shape[2], 1)  # at least as large as a caption is long
            for number, step in enumerate(steps):
                caption = f"{episode}: {camera} {step}" if number == 0 else str(step)
                row.append((caption, frames[step].repeat(times, axis=0).repeat(times, axis=1)))
        rows.append(row)
    return rows


def _action_table(demos: Demonstrations) -> Iterator[str]:
    found = demos.statistics["action"]
    said = demos.dataset.info["features"]["action"].get("names")
    labels = said if isinstance(said, list) and len(said) == demos.action_dim else range(demos.action_dim)
    columns = ("mean", "std", "min", "q01", "q99", "max")
    yield f"{'action entry':24}" + "".join(f"{name:>9}" for name in columns)
    for entry, label in enumerate(labels):
        yield f"  {label!s:22}" + "".join(f"{float(found[name].ravel()[entry]):9.3f}" for name in columns)


def task_rows(seed: int = 0) -> list[list[tuple[str, np.ndarray]]]:
    """One row for each task: the start of each of its distributions, then d0 done."""
    names = dict.fromkeys(name.rsplit("_d", 1)[0] for name in TASKS)
    return [_task_row([name for name in TASKS if name.rsplit("_d", 1)[0] == stem], seed) for stem in names]


def _task_row(tasks: list[str], seed: int) -> list[tuple[str, np.ndarray]]:
    if len(tasks) == 1:
        # one distribution only: several of its starts
        return [(tasks[0], _start_and_end(tasks[0], seed + k)[0]) for k in range(4)]
    pictures = {task: _start_and_end(task, seed) for task in tasks}
    done = pictures[tasks[0]][1]
    return [(task, start) for task, (start, _) in pictures.items()] + [(f"{tasks[0]}, done", done)]


def _start_and_end(task: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What the head camera sees of one episode, at its start and after its expert has played it."""
    # hands that can turn are where experts do best
    env = Tabletop(TabletopConfig(task=(task,), control_mode="delta_ee", threads=1), 1)
    env.reset(EpisodeSeeds(seed, "eval"))
    start = end = _head(env.render(0))
    if TASKS[task].expert is not None:
        expert = Expert(env)
        for _ in range(env.spec.max_episode_steps - 1):  # the step that ends an episode begins the next one
            env.step(expert())
        end = _head(env.render(0))
    env.close()
    return start, end


def _head(picture: np.ndarray) -> np.ndarray:
    """The first of the cameras, which are square and side by side."""
    return picture[:, : picture.shape[0]]
