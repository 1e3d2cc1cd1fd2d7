"""Inspection of a dataset as text and as a contact sheet, and images of the built-in tasks."""

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

_EPISODES, _MOMENTS = 6, 5  # rows and columns of a contact sheet


def summary(demos: Demonstrations) -> Iterator[str]:
    """A description of the dataset, line by line."""
    info, extras = demos.dataset.info, demos.dataset.extras
    yield f"episodes   {len(demos):,} of {demos.lengths.min()} to {demos.lengths.max()} steps"
    if demos.fps:
        seconds = demos.steps / demos.fps
        yield f"steps      {demos.steps:,} at {demos.fps:g} a second: {clock(seconds)} ({seconds / 3600:.2f} h)"
    else:
        yield f"steps      {demos.steps:,} at an unknown rate"
    yield f"robot      {info.get('robot_type') or 'unknown'}, control mode {demos.control_mode or 'unknown'}"
    for camera, (height, width) in demos.image_shapes.items():
        yield f"camera     {camera}, {height} x {width}"
    yield f"state      {demos.state_dim} entries"
    yield f"action     {demos.action_dim} entries"
    if demos.points:
        yield f"points     {demos.points} a step: x, y, z, r, g, b"
    if demos.has("next.success"):
        success = demos.numbers("next.success")[demos.starts[1:] - 1]
        yield f"successes  {int(success.sum()):,} of {len(demos):,} episodes ({success.mean():.1%})"
    else:
        yield "successes  unknown"
    if extras:
        tried = f"{len(demos):,} episodes kept of {extras['episodes_tried']:,} tried"
        yield f"recorded   {tried}, noise {extras['noise']:g}, seed {extras['seed']}"
        for task, count in Counter(extras["episode_tasks"]).items():
            yield f"task       {task}: {count:,} episodes"
    for text, count in Counter(demos.instruction(episode) for episode in range(len(demos))).most_common():
        yield f"wording    {text!r}: {count:,} episodes"
    yield from _action_table(demos)


def moments(demos: Demonstrations) -> list[list[tuple[str, np.ndarray]]]:
    """Rows of (caption, image) for a contact sheet: one row per episode, with frames of all cameras."""
    rows = []
    for episode in np.unique(np.linspace(0, len(demos) - 1, _EPISODES).round().astype(int)).tolist():
        steps = np.linspace(0, demos.lengths[episode] - 1, _MOMENTS).round().astype(int)
        row = []
        for camera in demos.cameras:
            frames = demos.images(camera, episode).transpose(0, 2, 3, 1)  # [T, H, W, 3]
            times = max(128 // frames.shape[2], 1)  # enlarged, so that a caption fits
            for number, step in enumerate(steps):
                caption = f"{episode}: {camera} {step}" if number == 0 else str(step)
                row.append((caption, frames[step].repeat(times, axis=0).repeat(times, axis=1)))
        rows.append(row)
    return rows


def _action_table(demos: Demonstrations) -> Iterator[str]:
    found = demos.statistics["action"]
    labels = demos.action_names or range(demos.action_dim)
    columns = ("mean", "std", "min", "q01", "q99", "max")
    yield f"{'action entry':24}" + "".join(f"{name:>9}" for name in columns)
    for entry, label in enumerate(labels):
        yield f"  {label!s:22}" + "".join(f"{float(found[name].ravel()[entry]):9.3f}" for name in columns)


def task_rows(seed: int = 0) -> list[list[tuple[str, np.ndarray]]]:
    """One row per task: a start state of each distribution, then d0 at the end of an episode."""
    names = dict.fromkeys(name.rsplit("_d", 1)[0] for name in TASKS)
    return [_task_row([name for name in TASKS if name.rsplit("_d", 1)[0] == stem], seed) for stem in names]


def _task_row(tasks: list[str], seed: int) -> list[tuple[str, np.ndarray]]:
    if len(tasks) == 1:
        # a single distribution: several start states
        return [(tasks[0], _start_and_end(tasks[0], seed + k)[0]) for k in range(4)]
    pictures = {task: _start_and_end(task, seed) for task in tasks}
    done = pictures[tasks[0]][1]
    return [(task, start) for task, (start, _) in pictures.items()] + [(f"{tasks[0]}, done", done)]


def _start_and_end(task: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The head camera's frames at the start and the end of an expert's episode."""
    # experts work best with the control mode that can rotate the hand
    env = Tabletop(TabletopConfig(task=(task,), control_mode="delta_ee", threads=1), 1)
    env.reset(EpisodeSeeds(seed, "eval"))
    start = end = _head(env.render(0))
    if TASKS[task].expert is not None:
        expert = Expert(env)
        for _ in range(env.spec.max_episode_steps - 1):  # the last step of an episode already starts the next one
            env.step(expert())
        end = _head(env.render(0))
    env.close()
    return start, end


def _head(picture: np.ndarray) -> np.ndarray:
    """The image of the first camera; the images are square and side by side."""
    return picture[:, : picture.shape[0]]
