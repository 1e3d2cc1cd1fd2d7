"""MimicGen's tasks, which are robosuite envs, e.g. `env.name=mimicgen:stack_d0`. They need robosuite 1.4.1."""

import contextlib
import importlib
import importlib.util
import io
from pathlib import Path
from typing import Any

from sparring.envs.sims.robosuite import Robosuite, create, import_robosuite, is_old
from sparring.errors import UserError

# task -> (variants, steps of an episode in its published evaluation, instruction). `mug_cleanup_o2` is left out: it
# draws a mug for each episode, and models are built once
TASKS = {
    "stack": ("d0 d1", 400, "put the red cube onto the green cube"),
    "stack_three": ("d0 d1", 400, "stack the red cube on the green cube and the blue cube on top"),
    "square": ("d0 d1 d2", 400, "put the square nut onto the square peg"),
    "nut_assembly": ("d0", 500, "put the square nut and the round nut onto their pegs"),
    "threading": ("d0 d1 d2", 400, "put the needle through the ring"),
    "three_piece_assembly": ("d0 d1 d2", 500, "put the first piece into the base and the second piece on top"),
    "coffee": ("d0 d1 d2", 400, "put the pod into the coffee machine and close the lid"),
    "coffee_preparation": ("d0 d1", 800, "put the mug on the machine, and a pod from the drawer into it"),
    "mug_cleanup": ("d0 d1 o1", 500, "open the drawer, put the mug into it and close it"),
    "hammer_cleanup": ("d0 d1", 500, "open the drawer, put the hammer into it and close it"),
    "kitchen": ("d0 d1", 800, "switch on the stove, cook in the pot, serve it and switch off the stove"),
    "pick_place": ("d0", 1000, "put all objects into their bins"),
}


def make(name: str, **kwargs: Any) -> Robosuite:
    known = [f"{task}_{variant}" for task, (variants, *_) in TASKS.items() for variant in variants.split()]
    if name not in known:
        raise UserError(f"env.name=mimicgen:{name} is unknown; expected {', '.join(known)}")
    _import_mimicgen()
    task, _, variant = name.rpartition("_")
    _, limit, instruction = TASKS[task]
    # stack_three_d1 -> StackThree_D1
    class_name = "".join(word.capitalize() for word in task.split("_")) + f"_{variant.upper()}"
    from robosuite.environments.base import REGISTERED_ENVS

    if class_name not in REGISTERED_ENVS:
        why = "MimicGen could not import it; run python -c 'import mimicgen' to read why"
        raise UserError(f"env.name=mimicgen:{name}: {why} (kitchen and hammer_cleanup need robosuite_task_zoo)")
    # the controller of its datasets
    return create(class_name, instruction, limit, **{"controller": "OSC_POSE", **kwargs})


def _import_mimicgen() -> None:
    """Import it, which registers its envs with robosuite."""
    found = importlib.util.find_spec("mimicgen")
    if found is None:
        raise UserError("MimicGen is not installed; install it from github.com/NVlabs/mimicgen: docs/simulators.md")
    folder = Path(next(iter(found.submodule_search_locations or ["mimicgen.py"])))
    if not (folder / "envs" / "robosuite" / "single_arm_env_mg.py").is_file():
        how = "pip uninstall mimicgen, then install it from github.com/NVlabs/mimicgen: docs/simulators.md"
        raise UserError(f"{folder} is not MimicGen but the package of that name on PyPI, which is unrelated; {how}")
    if not is_old(suite := import_robosuite()):
        how = "install robosuite 1.4.1 in an environment of its own: docs/simulators.md"
        raise UserError(f"MimicGen does not run with robosuite {suite.__version__}; {how}")
    with contextlib.redirect_stdout(io.StringIO()):  # tasks that it cannot import
        importlib.import_module("mimicgen")
