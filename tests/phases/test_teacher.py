"""The teacher phase: collection, counters, learning, bit-identical resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles_world_model import CopyingConfig, CopyingWorldModel
from PIL import Image
from tensordict import TensorDict

from sparring.cli.main import main
from sparring.config.schema import load_config
from sparring.config.section import ConfigError
from sparring.contract import EnvSpec
from sparring.data.episodes import EpisodeStore
from sparring.envs.backend import Step
from sparring.envs.env import Env
from sparring.phases.replay import FAILED, Prediction
from sparring.runs.checkpoint import checkpoints
from sparring.runs.run import Run

MODEL = {"name": "doubles_world_model:CopyingWorldModel"}
ENV = {"task": "explore", "cameras": ["head", "wrist"], "image_size": 16, "threads": 1}
SMALL = {
    "phase": "teacher",
    "env": ENV,
    "world_model": MODEL,
    "rollout": {"n_envs": 3, "steps": 4, "max_episode_steps": 9, "action_steps": 2},
    "teacher": {"gradient_steps": 5, "batch_size": 2, "sequential": True},
    "training": {"bptt_length": 2, "iterations": 4, "log_every": 1, "save_every": 1, "keep_checkpoints": 10},
    "evaluation": {"episodes": 3},
    "logging": {"console_level": "ERROR"},
    "device": "cpu",
}


def config_in(folder, **more):
    return load_config(SMALL | {"output": str(folder)} | more)


def single_steps(folder, decisions, teacher):
    """A config with `decisions` decisions of one step per update."""
    rollout = SMALL["rollout"] | {"steps": decisions, "action_steps": 1}
    return config_in(folder, rollout=rollout, teacher=teacher, training={"bptt_length": 3})


def closed(run: Run) -> Run:
    run.phase.close()
    return run


def run_to_the_end(config) -> Run:
    run = Run(config)
    assert run.run()
    return closed(run)


def lines(folder) -> list[dict]:
    timed = ("timestamp", "row", "crc", "perf/collect_seconds", "perf/update_seconds", "perf/steps_per_second")
    rows = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]


class BrighteningBackend:
    """Images start at 20 * env and brighten by 10 per decision; episodes have `length` decisions."""

    def __init__(self, num_envs: int, length: int):
        self.num_envs, self.length = num_envs, length
        observation = {"image/head": ((3, 16, 16), "uint8"), "state": ((1,), "float32")}
        self.spec = EnvSpec(observation, 1, max_episode_steps=length)

    def reset(self, seeds):
        self.count = np.zeros(self.num_envs, int)
        return self._observe()

    def step(self, action):
        self.count += 1
        done = self.count == self.length
        ended = np.nonzero(done)[0]
        final = {name: value[ended] for name, value in self._observe().items()}
        self.count[ended] = 0
        reward, executed = np.zeros(action.shape[:2], np.float32), np.full(self.num_envs, action.shape[1], np.int64)
        return Step(self._observe(), reward, executed, done & False, done, done & False, ended, final)

    def record(self, envs): ...

    def close(self): ...

    def _observe(self):
        level = (20 * np.arange(self.num_envs) + 10 * self.count).astype(np.uint8)
        image = np.broadcast_to(level[:, None, None, None], (self.num_envs, 3, 16, 16)).copy()
        return {"image/head": image, "state": level[:, None].astype(np.float32)}


CASES = {
    "in order": {},
    "shuffled": {"teacher": SMALL["teacher"] | {"sequential": False, "burn_in": 1}},
    "long episodes": {"rollout": SMALL["rollout"] | {"max_episode_steps": 21}},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_resumed_run_is_bit_identical(tmp_path, case):
    straight = run_to_the_end(config_in(tmp_path / "straight", **case))
    stopped = Run(config_in(tmp_path / "stopped", **case))
    for _ in range(2):
        stopped.phase.step(stopped.fraction)
    stopped.save()
    # updates after the last checkpoint are discarded
    stopped.phase.step(stopped.fraction)
    closed(stopped)
    resumed = run_to_the_end(config_in(tmp_path / "stopped", **case))
    assert resumed.phase.progress == straight.phase.progress
    assert torch.equal(resumed.phase.model.brighter, straight.phase.model.brighter)
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")[2:]
    stores = [EpisodeStore(tmp_path / name / "episodes", read_only=True) for name in ("straight", "stopped")]
    assert len(stores[0]) == len(stores[1]) > 0
    for i in range(len(stores[0])):
        one, other = (store.episode(i) for store in stores)
        assert all(torch.equal(one[key], other[key]) for key in one.keys(True, True))


def test_metrics_of_an_update(tmp_path):
    run = run_to_the_end(config_in(tmp_path))
    last = lines(tmp_path)[-1]
    # the first update collects 5 decisions, until an episode ends, the others 4: three episodes of each robot
    assert last["update"] == 4 and last["episode"] == 3 * 3
    # 9 steps are 4 decisions of two steps and one of one; and 2 decisions of the fourth episodes
    assert last["total_steps"] == 3 * (3 * 9 + 2 * 2)
    world_model = [f"world_model/{name}" for name in ("accuracy", "accuracy_copy", "accuracy_changed")]
    for key in ("avg_loss", "avg_acc", *world_model, "episode_reward", "lr"):
        assert isinstance(last[key], float), key
    assert last["avg_acc"] == last["world_model/fresh_accuracy"]
    assert run.phase.model.calls["loss"] == 4 * 5
    assert run.phase.model.calls["score"] == 5 + 3 * 4


def test_episode_reward_is_the_summed_accuracy_before_learning(tmp_path):
    """Images brighten by 10 per decision: a model that adds 10 is always right, a copying one never."""
    from sparring.phases.teacher import Teacher
    from sparring.processes.distributed import Distributed

    for brighter, expected in ((10.0, 6.0), (0.0, 0.0)):
        env = Env(BrighteningBackend(2, length=6))
        model = CopyingWorldModel(CopyingConfig(brighter=brighter), env.spec, 1)
        settings = {"gradient_steps": 1, "batch_size": 2, "learning_rate": 1e-9, "sequential": True}
        teacher = Teacher(single_steps(tmp_path / str(brighter), 12, settings), env, model, Distributed("cpu"))
        metrics = teacher.step(0.0)
        assert metrics["episode_reward"] == expected and metrics["fresh_acc"] == expected / 6
        assert teacher.progress.episodes == 4
        # the memory of a robot covers its current episode only
        assert teacher.memory.memory[:, 0].tolist() == [6.0, 6.0]
        teacher.close()


def test_accuracy_is_missing_before_the_first_prediction(tmp_path):
    """Ten tokenizer steps are two updates; in the third, untrained dynamics still score the new episodes."""
    model = {"name": "token", "preset": "tiny", "tokenizer_steps": 10, "width": 32, "layers": 1, "members": 1}
    training = SMALL["training"] | {"iterations": 6}
    run_to_the_end(config_in(tmp_path, world_model=model, training=training))
    results = [(line["avg_acc"] is None, "world_model/fresh_accuracy" in line) for line in lines(tmp_path)]
    assert results == [(True, False)] * 3 + [(False, True)] * 3


def test_accuracy_rises_with_training(tmp_path):
    from sparring.phases.teacher import Teacher
    from sparring.processes.distributed import Distributed

    env = Env(BrighteningBackend(2, length=6))
    model = CopyingWorldModel(CopyingConfig(), env.spec, 1)
    settings = {"gradient_steps": 60, "batch_size": 4, "learning_rate": 0.5}
    teacher = Teacher(single_steps(tmp_path, 6, settings), env, model, Distributed("cpu"))
    rewards = [teacher.step(fraction)["episode_reward"] for fraction in (0.0, 0.3, 0.6)]
    assert float(model.brighter.detach()) == pytest.approx(10.0, abs=0.5)
    # accuracy before learning: none in the first episodes, full in the last
    assert rewards[0] == 0 and rewards[2] == 6
    teacher.close()


def test_half_of_the_robots_have_correlated_actions(tmp_path):
    settings = {"n_envs": 4, "steps": 5, "max_episode_steps": 10, "action_steps": 2}
    run = Run(config_in(tmp_path, rollout=settings))
    assert run.phase.explorer.correlation[:, 0].tolist() == pytest.approx([0.95, 0.0, 0.95, 0.0])
    run.phase.step(0.0)
    closed(run)
    store = EpisodeStore(tmp_path / "episodes", read_only=True)
    # actions of each robot [T, C, A] -> mean change from step to step
    jumps = [float(store.episode(i)["action"].flatten(0, 1).diff(dim=0).abs().mean()) for i in range(4)]
    assert max(jumps[0], jumps[2]) < 0.35 < 0.5 < min(jumps[1], jumps[3])


def test_nothing_is_written_before_the_first_step(tmp_path):
    Run(config_in(tmp_path / "x")).phase.close()
    assert not (tmp_path / "x" / "episodes").exists()


def test_branch_warns_about_missing_episodes(tmp_path, capsys):
    run_to_the_end(config_in(tmp_path / "one"))
    checkpoint = checkpoints(tmp_path / "one")[1]
    branch = Run(config_in(tmp_path / "two", resume=str(checkpoint)))
    log = (tmp_path / "two" / "train.log").read_text()
    assert "earlier episodes are not in" in log
    assert branch.run()
    assert closed(branch).phase.progress.updates == 4


def test_sample_image_shows_prediction_left_and_truth_right(tmp_path):
    run = run_to_the_end(config_in(tmp_path))
    episodes = run.phase.progress.episodes
    file = tmp_path / "samples" / f"episode_{episodes:04d}_pred_vs_gt.png"
    sample = np.asarray(Image.open(file))
    assert sample.shape == (32, 32, 3)
    store = EpisodeStore(tmp_path / "episodes", read_only=True)
    step = store.episode(len(store) - 1)[2]
    for row, camera in enumerate(("head", "wrist")):
        true = step["next", "observation", "image", camera].permute(1, 2, 0).numpy()
        copied = step["observation", "image", camera].numpy().astype(float) + float(run.phase.model.brighter.detach())
        copied = copied.round().clip(0, 255).transpose(1, 2, 0)
        assert np.array_equal(sample[16 * row : 16 * row + 16, 16:], true)
        assert np.abs(sample[16 * row : 16 * row + 16, :16] - copied).max() <= 1
    assert (tmp_path / "videos" / f"episode_{episodes:06d}.mp4").stat().st_size > 500


@pytest.mark.parametrize("brighter", [float("nan"), float("inf")])
def test_model_with_nan_weights_gives_failure_frames(brighter):
    spec = EnvSpec({"image/head": ((3, 16, 16), "uint8")}, 1)
    model = CopyingWorldModel(CopyingConfig(), spec, 1)
    model.brighter.data.fill_(brighter)
    image = torch.full((2, 3, 16, 16), 50, dtype=torch.uint8)
    after = {"observation": {"image": {"head": image}}, "reward": torch.ones(2, 1)}
    seen = {"observation": {"image": {"head": image}}, "next": after}
    first = torch.tensor([True, False])
    episode = TensorDict(seen | {"action": torch.zeros(2, 1, 1), "is_first": first}, [2])
    shown = Prediction.of(model, episode, 5.0)
    for frame in (shown.frame(0), shown.frame(1)):
        assert (frame[:, :16] == FAILED).all() and (frame[:, 16:] == 50).all()


def test_original_settings_are_accepted():
    settings = {"phase": "wm", "training": {"num_episodes": 500, "batch_size": 8, "learning_rate": 1e-4}}
    settings["training"] |= {"steps_per_episode": 50, "bptt_length": 4, "sequential_training": True}
    config = load_config(settings)
    assert config.phase == "teacher" and config.training.num_episodes == 500 and config.training.bptt_length == 4
    assert (config.teacher.batch_size, config.teacher.learning_rate, config.teacher.sequential) == (8, 1e-4, True)
    assert config.rollout.max_episode_steps == 50
    # a world model observes images, not object poses
    assert config.env.cameras == ("head", "wrist") and config.env.object_state == "hidden"
    # other envs get no settings
    assert load_config({"phase": "teacher", "env": {"name": "gym:CartPole-v1"}}).env.name == "gym:CartPole-v1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": {"cameras": []}}, "env.cameras = .*: a world model predicts images; expected cameras"),
        ({"rollout": {"n_episodes_per_batch": 16}}, "the teacher collects rollout.steps"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_config({"phase": "teacher"} | settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("teacher")
    run_to_the_end(config_in(folder))
    return folder


def test_eval_world_model_writes_its_measures(trained, tmp_path, capsys):
    file = tmp_path / "found.json"
    words = ["eval", str(trained), "--world-model", "--json", str(file), "--against", str(trained)]
    assert main([*words, "--episodes", "4", "env.segmentation=true"]) == 0
    printed = capsys.readouterr().out
    assert "4 held-out episodes, random actions" in printed and "changed pixels, MSE ratio" in printed
    found = json.loads(file.read_text())
    assert found["episodes"] == 4 and found["split"] == "eval" and found["transitions"] == 4 * 5
    assert found["decision_seconds"] == pytest.approx(0.08)
    assert set(found["cameras"]) == {"head", "wrist"} and set(found["open_loop"]) == {"1", "5", "10", "20"}
    # compared with itself
    assert found["against"]["cross_entropy"] == 0 and found["against"]["cameras"]["head"]["object_mse"] == 0
    # a repetition gives equal results
    assert main([*words[:3], "--episodes", "4", "env.segmentation=true"]) == 0
    again = json.loads((trained / "eval_world_model.json").read_text())
    assert again | {"crc": None} == {key: value for key, value in found.items() if key != "against"} | {"crc": None}


def test_compare_world_models(trained, tmp_path, capsys):
    run_to_the_end(config_in(tmp_path, world_model=MODEL | {"brighter": 1.0}))
    words = ["--world-model", "--episodes", "6", "--json", str(tmp_path / "found.json")]
    assert main(["compare", str(trained), str(trained), *words]) == 0
    assert "no difference: A and B have the same results in all 6 episodes" in capsys.readouterr().out
    assert main(["compare", str(trained), str(tmp_path), *words]) == 0
    (found,) = json.loads((tmp_path / "found.json").read_text())["measured"]
    # the double adds one to the last frame here, so its error is larger
    assert found["name"] == "MSE ratio" and found["a"] == 1 != found["b"]
    assert main(["compare", str(trained), str(tmp_path)]) == 2
    assert "holds a world model, not a policy; give --world-model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "holds a world model, not a policy; give --world-model"),
        (["--exploration"], "holds a world model, not a policy"),
        (["--against", "x"], "--against needs --world-model"),
        (["--world-model", "--videos", "2"], "--world-model and --exploration exclude --stochastic"),
        (["--world-model", "--exploration"], "give only one of them"),
        (["--world-model", "env.image_size=32"], "was trained in another env"),
        (["--world-model", "--against", "nowhere"], "'nowhere' does not exist"),
    ],
)
def test_invalid_evaluations_are_refused(trained, capsys, words, message):
    assert main(["eval", str(trained), *words]) == 2
    assert message in capsys.readouterr().err


def test_dry_run_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "teacher", "--dry-run", f"world_model.name={MODEL['name']}", "env.image_size=16", "--envs", "2"]
    assert (
        main(
            [*words, "rollout.steps=3", "rollout.max_episode_steps=8", "teacher.gradient_steps=2", "--batch_size", "5"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "action                       [5, 14, 4, 7]" in printed and "\nloss: " in printed
    assert list(tmp_path.iterdir()) == []


def test_documented_original_config_loads():
    config = load_config(Path(__file__).parents[2] / "configs" / "teacher_original.yaml")
    training = config.training
    assert (training.num_episodes, training.save_every, training.log_every) == (100, 50, 10)
    assert (config.teacher.batch_size, config.teacher.learning_rate) == (8, 1e-4)
    # one update per episode of 50 decisions
    assert config.rollout.max_episode_steps == config.rollout.steps == 50 and config.rollout.n_envs == 1


def teach_on_this_rank(folder):
    """Run by each of two processes."""
    torch.set_num_threads(1)
    run = run_to_the_end(config_in(folder))
    stopped = Run(config_in(f"{folder}/stopped"))
    for _ in range(2):
        stopped.phase.step(stopped.fraction)
    stopped.save()
    closed(stopped)
    resumed = run_to_the_end(config_in(f"{folder}/stopped"))
    store = EpisodeStore(run.phase.replay.store.folder, read_only=True)
    results = {
        "weights": dict(run.phase.model.state_dict()),
        "resumed": dict(resumed.phase.model.state_dict()),
        "progress": (run.phase.progress.env_steps, run.phase.progress.episodes),
        "first": store.episode(0)["action"][0].clone(),
        "folder": run.phase.replay.store.folder.name,
    }
    torch.save(results, f"{folder}/rank{run.distributed.rank}.pt")


@pytest.mark.usefixtures("forked")
def test_two_processes_have_equal_weights_and_separate_episodes(tmp_path):
    code = (
        "import sys; from accelerate import debug_launcher; from test_teacher import teach_on_this_rank as work;"
        "debug_launcher(work, (sys.argv[1],), num_processes=2)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "doubles"), *sys.path])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, timeout=600)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert torch.equal(first["weights"]["brighter"], second["weights"]["brighter"])
    for rank in (first, second):
        assert torch.equal(rank["weights"]["brighter"], rank["resumed"]["brighter"])
    # twice as many robots, separate episodes of each process
    assert first["progress"] == second["progress"] == (2 * 93, 2 * 9)
    assert (first["folder"], second["folder"]) == ("episodes", "episodes-1")
    assert not torch.equal(first["first"], second["first"])


def test_explorer_settings_may_change_on_resume(tmp_path):
    run_to_the_end(config_in(tmp_path))
    explorer = {"rewards.rnd": 1.0, "policy.hidden": [9], "ppo.gamma": 0.5, "student.cameras": ["head"]}
    changed = config_in(tmp_path, **explorer)
    assert changed.policy.hidden == (9,) and run_to_the_end(changed).phase.progress.updates > 0
    with pytest.raises(ConfigError, match="teacher.burn_in"):
        Run(config_in(tmp_path, **{"teacher.burn_in": 5}))
