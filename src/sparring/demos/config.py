"""The config of a recording: the env section of any run, with the defaults of a dataset."""

import os
from pathlib import Path

from sparring.config_text import Setting, read_settings
from sparring.envs.tabletop.tasks import TASKS
from sparring.errors import UserError
from sparring.tree import Config, load_config


def demo_config(tasks: list[str], file: str | None, settings: list[Setting]) -> Config:
    """What is seen is all that the robot's cameras see; where the objects are is recorded apart from its state."""
    cameras = TASKS[tasks[0]].scene.cameras if tasks[0] in TASKS else ()
    if any(setting.key in ("env.task", "task_name") for setting in settings):
        raise UserError(f"the task is given twice: as {' '.join(tasks)} and as an override; leave the override out")
    given = read_settings(file) if file else []
    others = [s.value for s in [*given, *settings] if s.key == "env.name" and s.value != "tabletop"]
    if others:
        raise UserError(f"env.name={others[-1]} has no scripted experts; only the built-in tabletop has them")
    defaults = [
        Setting("env.cameras", list(cameras), "default"),
        Setting("env.object_state", "privileged", "default"),
    ]
    # `rollout.n_envs` must be a multiple of the tasks, though recording has its own number of robots
    asked = [Setting("env.task", tasks, "command line"), Setting("rollout.n_envs", len(tasks), "command line")]
    return load_config(None, [*defaults, *given, *settings, *asked])


def demo_folder(tasks: list[str]) -> Path:
    return Path(os.environ.get("OUTPUT_BASE", "outputs")) / "demos" / "_".join(tasks)
