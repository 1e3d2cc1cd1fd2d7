"""All tasks by name. The suffix is the distribution of starts: d0 narrow (about +-3 cm), d1 wider, d2 more than 60 % of
the table within reach of a hand that points down, at any yaw (docs/suite.md has the shares for two arms)."""

from dataclasses import replace
from difflib import get_close_matches

from sparring.envs.tabletop.tasks.base import WIDE, Reach, Sector, Task
from sparring.envs.tabletop.tasks.dual import Area, Handover, LiftTray
from sparring.envs.tabletop.tasks.explore import Explore
from sparring.envs.tabletop.tasks.manipulate import COLOURS, PLACE, REACHABLE, STACK, Lift, Push
from sparring.envs.tabletop.tasks.mechanisms import Button, Drawer
from sparring.errors import UserError

_NARROW, _WIDER = Sector(0.25, 0.31, 6), Sector(0.22, 0.42, 35)
_ROW = {colour: replace(_NARROW, ahead=ahead) for colour, ahead in zip(COLOURS, (25, 0, -25), strict=True)}
_ANY = {sector: dict.fromkeys(COLOURS, sector) for sector in (_WIDER, WIDE)}

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Reach("reach_d0", low=(-0.16, -0.06, 0.08), high=(-0.04, 0.06, 0.20), joint_noise=0.02),
        Reach("reach_d1", low=(-0.18, -0.14, 0.06), high=(0.00, 0.14, 0.22), joint_noise=0.05),
        Reach("reach_d2", low=(-0.20, -0.24, 0.04), high=(0.02, 0.24, 0.24), joint_noise=0.10),
        Push("push_d0", _NARROW, Sector(0.37, 0.43, 5), travel=(0.06, 0.18), yaw=0, joint_noise=0.02),
        Push("push_d1", _WIDER, _WIDER, travel=(0.08, 0.20), yaw=20, joint_noise=0.05),
        Push("push_d2", WIDE, WIDE, travel=(0.08, 0.20), yaw=45, joint_noise=0.05),
        Lift("lift_d0", _NARROW, yaw=0, joint_noise=0.02),
        Lift("lift_d1", _WIDER, yaw=20, joint_noise=0.05),
        Lift("lift_d2", WIDE, yaw=45, joint_noise=0.05),
        *(
            Lift.pick(f"pick_{colour}_d{d}", cubes, yaw, noise)
            for colour in COLOURS
            for d, (cubes, yaw, noise) in enumerate([(_ROW, 0, 0.02), (_ANY[_WIDER], 20, 0.05), (_ANY[WIDE], 45, 0.05)])
        ),
        PLACE("place_d0", _NARROW, Sector(0.38, 0.44, 5), apart=(0.10, 0.20), yaw=0, joint_noise=0.02),
        PLACE("place_d1", _WIDER, _WIDER, apart=(0.12, 0.25), yaw=20, joint_noise=0.05),
        PLACE("place_d2", WIDE, WIDE, apart=(0.12, 0.30), yaw=45, joint_noise=0.05),
        STACK("stack_d0", _NARROW, Sector(0.38, 0.44, 5), apart=(0.09, 0.20), yaw=0, joint_noise=0.02),
        STACK("stack_d1", _WIDER, _WIDER, apart=(0.10, 0.25), yaw=20, joint_noise=0.05),
        STACK("stack_d2", WIDE, WIDE, apart=(0.10, 0.30), yaw=45, joint_noise=0.05),
        Drawer("drawer_d0", _NARROW, front=-90, spread=5, joint_noise=0.02),
        Drawer("drawer_d1", _WIDER, front=-90, spread=35, joint_noise=0.05),
        Drawer("drawer_d2", REACHABLE, front=0, spread=180, joint_noise=0.05),
        Button("button_d0", _NARROW, yaw=0, joint_noise=0.02),
        Button("button_d1", _WIDER, yaw=20, joint_noise=0.05),
        Button("button_d2", WIDE, yaw=45, joint_noise=0.05),
        Handover("handover_d0", Area((-0.14, -0.09), (0.325, 0.375)), yaw=0, joint_noise=0.02),
        Handover("handover_d1", Area((-0.22, 0.00), (0.28, 0.42)), yaw=20, joint_noise=0.05),
        Handover("handover_d2", Area((-0.48, 0.15), (0.00, 0.53)), yaw=90, joint_noise=0.05),
        LiftTray("lift_tray_d0", Area((-0.15, -0.10), (-0.025, 0.025)), yaw=0, offset=0.01, joint_noise=0.02),
        LiftTray("lift_tray_d1", Area((-0.22, -0.02), (-0.10, 0.10)), yaw=20, offset=0.02, joint_noise=0.05),
        LiftTray("lift_tray_d2", Area((-0.45, 0.10), (-0.35, 0.35)), yaw=60, offset=0.03, joint_noise=0.05),
        Explore("explore", joint_noise=0.05),
    )
}


def find(name: str) -> Task:
    if name in TASKS:
        return TASKS[name]
    near = get_close_matches(name, TASKS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"env.task={name!r} is not a tabletop task; {hint}expected one of: {', '.join(TASKS)}")


def describe() -> list[tuple[str, str, str]]:
    texts = {task: ", ".join(f"{key} {value}" for key, value in task.describe().items()) for task in TASKS.values()}
    return [(task.name, task.instructions[0], text) for task, text in texts.items()]


def register() -> None:
    """Register the tasks in gymnasium, which imports their env classes only to create an env."""
    import gymnasium

    for task in TASKS:
        env_id = f"sparring/{task}"
        if env_id not in gymnasium.registry:
            module = "sparring.envs.registered"  # no max_episode_steps: the env truncates its own episodes
            vector, kwargs = f"{module}:TabletopVectorGym", {"id_task": task}
            gymnasium.register(env_id, f"{module}:TabletopGym", vector_entry_point=vector, kwargs=kwargs)
