"""MimicGen through its adapter, with doubles of the two packages; what is stored here is from the published source."""

import importlib.util
import sys
import types

import numpy as np
import pytest

from sparring.envs.configs import GymConfig
from sparring.envs.gym import GymRobot
from sparring.envs.sims import mimicgen, robosuite

# github.com/NVlabs/mimicgen at 72bd767c255545f462e7ccfb2731f2e5d4c1d9bb: mimicgen/envs/robosuite/*.py, and the "core"
# and "object" tasks of mimicgen/__init__.py with their horizons
PUBLISHED = {
    "Stack_D0": 400,
    "Stack_D1": 400,
    "StackThree_D0": 400,
    "StackThree_D1": 400,
    "Square_D0": 400,
    "Square_D1": 400,
    "Square_D2": 400,
    "NutAssembly_D0": 500,
    "Threading_D0": 400,
    "Threading_D1": 400,
    "Threading_D2": 400,
    "ThreePieceAssembly_D0": 500,
    "ThreePieceAssembly_D1": 500,
    "ThreePieceAssembly_D2": 500,
    "Coffee_D0": 400,
    "Coffee_D1": 400,
    "Coffee_D2": 400,
    "CoffeePreparation_D0": 800,
    "CoffeePreparation_D1": 800,
    "MugCleanup_D0": 500,
    "MugCleanup_D1": 500,
    "MugCleanup_O1": 500,
    "HammerCleanup_D0": 500,
    "HammerCleanup_D1": 500,
    "Kitchen_D0": 800,
    "Kitchen_D1": 800,
    "PickPlace_D0": 1000,
}
# parameters of Coffee.__init__ there, which are those of the envs of robosuite 1.4.1
PARAMETERS = {
    *("robots", "env_configuration", "controller_configs", "gripper_types", "initialization_noise", "table_full_size"),
    *("table_friction", "use_camera_obs", "use_object_obs", "reward_scale", "reward_shaping", "has_renderer"),
    *("has_offscreen_renderer", "render_camera", "render_collision_mesh", "render_visual_mesh", "render_gpu_device_id"),
    *("control_freq", "horizon", "ignore_done", "hard_reset", "camera_names", "camera_heights", "camera_widths"),
    *("camera_depths", "camera_segmentations", "renderer", "renderer_config"),
}
NAMES = [f"{task}_{variant}" for task, (variants, *_) in mimicgen.TASKS.items() for variant in variants.split()]


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """A double of MimicGen, which registers its classes on import, and of robosuite 1.4.1. Yields the arguments of its
    `make`, which raises."""
    folder = tmp_path / "mimicgen"
    (folder / "envs" / "robosuite").mkdir(parents=True)
    (folder / "envs" / "robosuite" / "single_arm_env_mg.py").touch()
    lines = ["print('WARNING: robosuite task zoo environments not imported')"]
    lines += ["from robosuite.environments.base import REGISTERED_ENVS"]
    lines += [f"REGISTERED_ENVS['{name}'] = object" for name in PUBLISHED if not name.startswith("Kitchen")]
    (folder / "__init__.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []
    suite, base = types.ModuleType("robosuite"), types.ModuleType("robosuite.environments.base")
    suite.__version__, suite.__path__, suite.ALL_ROBOTS = "1.4.1", [], ["Panda", "Sawyer"]
    suite.ALL_CONTROLLERS = ["OSC_POSE", "JOINT_VELOCITY"]
    suite.load_controller_config = lambda default_controller: {"type": default_controller}

    def make(name, **kwargs):
        made.append((name, kwargs))
        raise ValueError("this is a double")

    suite.make, base.REGISTERED_ENVS = make, {}
    for name, module in (("robosuite", suite), (base.__name__, base), ("mimicgen", None)):
        monkeypatch.setitem(sys.modules, name, module)
    del sys.modules["mimicgen"]
    monkeypatch.setitem(sys.modules, "robosuite.environments", types.ModuleType("robosuite.environments"))
    return made


def test_names_and_steps_are_those_of_the_published_source(packages):
    for name, (expected, limit) in zip(NAMES, PUBLISHED.items(), strict=True):
        task = name.rpartition("_")[0]
        assert mimicgen.TASKS[task][1] == limit and name.replace("_", "") == expected.lower().replace("_", "")
        if task == "kitchen":
            continue
        with pytest.raises(ValueError, match="this is a double"):
            mimicgen.make(name)
        assert packages[-1][0] == expected


def test_its_envs_get_parameters_that_they_have(packages, capsys):
    with pytest.raises(ValueError, match="robosuite refuses Stack_D0 with robots=.'Panda'., controller=OSC_POSE"):
        mimicgen.make("stack_d0", reward="sparse")
    ((_, given),) = packages
    assert set(given) <= PARAMETERS
    assert given["controller_configs"] == [{"type": "OSC_POSE"}] and given["reward_shaping"] is False
    assert given["hard_reset"] is given["use_camera_obs"] is given["has_offscreen_renderer"] is False
    with pytest.raises(ValueError, match="controller=JOINT_VELOCITY"):
        mimicgen.make("coffee_d2", controller="JOINT_VELOCITY", robots=["Sawyer"])
    assert packages[-1][1]["robots"] == ["Sawyer"] and capsys.readouterr().out == ""


def test_what_cannot_run_is_refused(packages, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="mimicgen:stack_d2 is unknown; expected stack_d0, stack_d1, stack_three_d0"):
        mimicgen.make("stack_d2")
    with pytest.raises(ValueError, match="kitchen and hammer_cleanup need robosuite_task_zoo"):
        mimicgen.make("kitchen_d0")
    sys.modules["robosuite"].load_composite_controller_config = None  # as from 1.5 on
    with pytest.raises(ValueError, match="MimicGen does not run with robosuite 1.4.1; install robosuite 1.4.1"):
        mimicgen.make("stack_d0")


def test_the_unrelated_package_of_its_name_is_refused_and_not_imported(monkeypatch, tmp_path):
    # mimicgen 1.0.0 on PyPI: __init__.py and main.py
    (tmp_path / "mimicgen").mkdir()
    (tmp_path / "mimicgen" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "mimicgen" / "main.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mimicgen", raising=False)
    with pytest.raises(ValueError, match="is not MimicGen but the package of that name on PyPI, which is unrelated"):
        mimicgen.make("stack_d0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="MimicGen is not installed; install it from github.com/NVlabs/mimicgen"):
        mimicgen.make("stack_d0")


@pytest.mark.sims
@pytest.mark.parametrize("name", ["stack_d0", "square_d1", "coffee_d0"])
def test_its_envs_restore_their_states_exactly(name):
    pytest.importorskip("mimicgen", reason="needs MimicGen: docs/simulators.md")
    pytest.importorskip("robosuite", reason="MimicGen needs robosuite 1.4.1: docs/simulators.md")
    if not robosuite.is_old(robosuite.import_robosuite()):
        pytest.skip("MimicGen needs robosuite 1.4.1, in an environment of its own: docs/simulators.md")

    def play(one, seed):
        rng, found, reward = np.random.default_rng(seed), [], np.zeros(1)
        for _ in range(50):
            one.step([rng.uniform(-1, 1, 7).astype(np.float32)], reward)
            found.append((float(reward[0]), one._observation["state"].tolist()))
        return found

    one, other = (GymRobot(GymConfig(name=f"mimicgen:{name}")) for _ in range(2))
    one.reset(5)
    other.reset(5)
    assert play(one, 0) == play(other, 0)  # also with the global random generators of robosuite 1.4
    saved, expected = one.state(), play(one, 1)
    other.reset(9)
    other.set_state(saved)
    assert play(other, 1) == expected
