"""The commands that a run recommends at its end work unchanged, for any run folder and settings."""

import os
import shlex

import pytest

from sparring.cli.main import main
from sparring.config.schema import load_config
from sparring.runs.summary import _next_commands as next_commands

TINY = ["device=cpu", "policy.hidden=[8]", "rollout.steps=16", "rollout.render_episodes=0"]
SMALL = ["--envs", "3", "training.iterations=1", "evaluation.episodes=3", "logging.console_level=ERROR", *TINY]
POLE = ["env.name=gym:CartPole-v1"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("OUTPUT_BASE", raising=False)


def recommended(output: str, *settings: str) -> list[str]:
    assert main(["train", "finetune", "--output", output, *SMALL, *settings]) == 0
    return list(next_commands(load_config(os.path.join(output, "config.yaml"))))


@pytest.mark.parametrize(
    ("output", "settings", "following"),
    [
        ("outputs/foo", POLE, "outputs/foo-2"),
        ("outputs/lr-3", POLE, "outputs/lr-4"),
        ("outputs/my run", POLE, "outputs/my run-2"),
        # a name that looks like a number
        ("2024", POLE, "2024-2"),
        ("outputs/tasks", ["env.task=[reach_d0,reach_d1,lift_d0]", "env.threads=1"], "outputs/tasks-2"),
        ("outputs/limited", ["env.name=endless:Endless", "rollout.max_episode_steps=9"], "outputs/limited-2"),
    ],
)
def test_recommended_commands_work_unchanged(output, settings, following, monkeypatch, capsys):
    with open("endless.py", "w") as file:
        file.write("from gymnasium.envs.classic_control import PendulumEnv as Endless\n")
    monkeypatch.syspath_prepend(os.getcwd())
    report, video, train = recommended(output, *settings)
    assert main(shlex.split(report)[1:]) == 0 and os.path.exists(f"{output}/report.html")
    assert main([*shlex.split(video)[1:], "--episodes", "3"]) == 0
    words = shlex.split(train)[1:]
    assert words[words.index("--output") + 1] == following
    # only the length differs
    assert main([*words, *TINY, "training.iterations=1", "evaluation.episodes=3"]) == 0, capsys.readouterr().err
    assert os.path.exists(f"{following}/checkpoint-1")


@pytest.mark.parametrize("task_weights", [[], ["rewards.task_reward=0.5"]])
def test_user_rewards_are_part_of_the_recommended_command(task_weights, monkeypatch, capsys):
    with open("own_rewards.py", "w") as file:
        file.write("def calm(td):\n    return -td['action'].abs().sum((-1, -2))\n")
    monkeypatch.syspath_prepend(os.getcwd())
    weights = ["rewards.own_rewards:calm=0.1", *task_weights]
    *_, train = recommended("outputs/calm", "env.name=gym:Pendulum-v1", *weights)
    start = "sparring train finetune pretrained=outputs/calm --output outputs/calm-2"
    assert shlex.split(train) == [*shlex.split(start), *weights]
    more = [*TINY, "training.iterations=1", "evaluation.episodes=3"]
    assert main([*shlex.split(train)[1:], *more]) == 0, capsys.readouterr().err
    rewards = [load_config(f"outputs/{name}/config.yaml").rewards for name in ("calm", "calm-2")]
    assert rewards[0] == rewards[1] and rewards[0].terms == {"own_rewards:calm": 0.1}


def test_recommended_folder_for_a_run_in_the_working_directory(tmp_path):
    *_, train = recommended(".", *POLE)
    assert train.endswith(f"--output {tmp_path}/work-2")


def test_existing_folder_is_not_recommended():
    os.makedirs("outputs/foo-2")
    *_, train = recommended("outputs/foo", *POLE)
    assert train == "sparring train finetune pretrained=outputs/foo --output outputs/foo-3"


def test_absolute_run_folder_stays_absolute():
    config = load_config({"env": {"name": "gym:CartPole-v1"}, "output": "/out"})
    assert [word for line in next_commands(config) for word in line.split() if "pretrained" in word] == [
        "pretrained=/out"
    ]
