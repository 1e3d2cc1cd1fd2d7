"""Imports of light commands and modules stay light; each is measured in a new process."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
HEAVY = ("torch", "tensordict", "mujoco", "numba", "gymnasium", "numpy", "pydantic", "yaml")


def loaded_after(code: str) -> set[str]:
    """The heavy packages that are loaded after `code` has run."""
    report = f"\nimport sys; print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code + report], env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("LOADED")]
    return set(line.split()[1:])


def command(*words: str, code: int = 0) -> str:
    """A program that runs `sparring WORDS` and checks its exit code."""
    return (
        "from sparring.cli.main import main\n"
        f"try: code = main({list(words)!r})\n"
        "except SystemExit as stop: code = stop.code or 0\n"
        f"assert code == {code}, code"
    )


def seconds(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)
    return time.perf_counter() - started


def test_importing_the_package_is_fast_and_loads_nothing():
    assert loaded_after("import sparring") == set()
    bare = min(seconds("") for _ in range(3))
    assert min(seconds("import sparring") for _ in range(3)) - bare < 0.3


@pytest.mark.parametrize(
    ("program", "allowed"),
    [
        (command("--help"), set()),
        (command("train", "--help"), {"yaml"}),
        (command("completion", "bash"), set()),
        (command("__complete", "train", "finetune", "ppo."), {"yaml", "pydantic"}),
        (command("config", "finetune"), {"yaml", "pydantic", "numpy"}),
        (command("config", "phase3"), {"yaml", "pydantic", "numpy"}),
        (command("train", "finetune", "ppo.gama=1", code=2), {"yaml", "pydantic", "numpy"}),
        (command("tasks"), {"yaml", "numpy"}),
        (command("runs", "."), {"yaml"}),
        ("import sparring.report.page", {"yaml", "pydantic", "numpy"}),
        (command("config", "env.name=gym:CartPole-v1"), {"yaml", "pydantic", "numpy", "gymnasium"}),
    ],
    ids=[
        "help",
        "train help",
        "completion",
        "complete",
        "config",
        "config phase3",
        "mistake",
        "tasks",
        "runs",
        "report",
        "config gym",
    ],
)
def test_commands_without_computation_load_no_torch(program, allowed):
    loaded = loaded_after(program)
    assert "torch" not in loaded
    assert loaded <= allowed


@pytest.mark.parametrize(
    "module",
    ["worker_main", "gym", "gym_batch", "backend", "configs", "registered", "tabletop.backend"],
)
def test_modules_of_env_workers_load_no_torch(module):
    assert {"torch", "tensordict"} & loaded_after(f"import sparring.envs.{module}") == set()


@pytest.mark.parametrize(
    "program",
    [
        "gymnasium.make('sparring:sparring/lift_d0')",
        "gymnasium.make_vec('sparring:sparring/lift_d0', 2)",
        "import sparring; gymnasium.register_envs(sparring); gymnasium.make('sparring/lift_d0')",
        "gymnasium.make('sparring.envs.registered:sparring/lift_d0')",
    ],
)
def test_gymnasium_finds_the_tasks(program):
    loaded_after(f"import gymnasium; {program}")


def test_registering_the_tasks_loads_no_simulator():
    assert loaded_after("import gymnasium, sparring") <= loaded_after("import gymnasium")
    assert "mujoco" not in loaded_after("import gymnasium, sparring; assert 'sparring/lift_d0' in gymnasium.registry")


def test_names_of_the_package_are_loaded_on_first_use():
    code = "import sparring\nfrom sparring import load_config\nassert load_config().seed == 0\n"
    code += "try: sparring.nothing\nexcept AttributeError as e: assert \"has no attribute 'nothing'\" in str(e)\n"
    code += "else: raise SystemExit('no error')"
    assert "torch" not in loaded_after(code)


def test_names_of_sparring_data_are_loaded_on_first_use():
    code = "import sparring.data\nassert 'EpisodeStore' in dir(sparring.data)\n"
    code += "try: sparring.data.nothing\nexcept AttributeError as e: assert 'it offers BatchBuilder, ' in str(e)\n"
    code += "else: raise SystemExit('no error')"
    assert loaded_after(code) == set()


NAMES = ["Trainer", "load_policy", "load_config", "make_env", "make_policy", "PPO", "GRPO"]


def test_every_name_of_the_package_exists():
    import sparring

    assert set(NAMES) <= set(sparring.__all__)
    for name in NAMES:
        assert getattr(sparring, name).__name__ == name
    import sparring.data

    for name in sparring.data.__all__:
        assert getattr(sparring.data, name).__name__ == name


def test_torchvision_is_absent_or_importable():
    from sparring.check.command import _torchvision

    found = _torchvision()
    assert (found.what, found.severity) == ("torchvision", "ok"), found
