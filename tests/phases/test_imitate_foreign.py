"""Imitation of other programs' datasets: on the dataset alone, and in an env with other words, rates, units, images."""

import json
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from foreign_datasets import TASKS, episodes, lerobot_v21, robomimic

from sparring.api import load_policy
from sparring.cli.main import main
from sparring.config.schema import load_config
from sparring.data.chunks import ActionChunks
from sparring.data.dataset import DatasetError, read_dataset
from sparring.data.demonstrations import Demonstrations
from sparring.errors import UserError
from sparring.evaluation.action_error import ActionError
from sparring.phases.demonstrations import make_imitation_env, open_demonstrations, read_datasets
from sparring.phases.imitate import Imitate
from sparring.processes.distributed import Distributed
from sparring.processes.rows import RowFile
from sparring.runs.checkpoint import checkpoints, load_spec

KEYS = "imitate.keys={observation.state: state, observation.environment_state: state}"
ENV = ["env.name=foreign_datasets:ReachEnv", "policy.normalize_actions=true"]
SHORT = ["policy.hidden=[32,32]", "policy.channels=[4]", "policy.image_features=8", "imitate.batch_size=64"]
LONG = [*SHORT, "training.iterations=4", "imitate.steps_per_update=100", "imitate.learning_rate=3e-3"]
SHORT += ["training.iterations=1", "imitate.steps_per_update=2", "evaluation.episodes=2", "rollout.n_envs=2"]


@pytest.fixture(scope="module")
def v21(tmp_path_factory):
    return lerobot_v21(tmp_path_factory.mktemp("lerobot") / "set", episodes(40))


@pytest.fixture(scope="module")
def hdf5(tmp_path_factory):
    return robomimic(tmp_path_factory.mktemp("robomimic") / "demo.hdf5", episodes(40), valid=(3, 17, 31))


@pytest.fixture(scope="module")
def alone(v21, tmp_path_factory):
    """A run on the dataset alone."""
    out = tmp_path_factory.mktemp("run") / "alone"
    words = ["train", "imitate", f"imitate.demos={v21}", KEYS[:-1] + ", task: ignore}", "evaluation.every=1"]
    words += ["env.image_size=[12,20]", "env.action_low=[0,0]", "env.action_high=[10,10]", "--output", str(out), *LONG]
    assert main(words) == 0
    return out


def evaluations(folder):
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


def spec_of(settings):
    config = load_config(settings)
    return make_imitation_env(config, read_datasets(config.imitate)).spec


# ---- without an env


def test_held_out_action_error_falls_on_a_dataset_alone(alone, capsys):
    rows = evaluations(alone)
    errors = [row["eval/action_error_ratio"] for row in rows]
    assert len(errors) == 4 and errors[-1] < 0.08 < 0.12 < errors[0]
    last = rows[-1]
    # 10 % of 40 episodes are held out; the ratio is the mean over the entries x and y
    assert last["eval/episodes"] == 4
    entries = [last[f"eval/{name}/action_error_ratio"] for name in "xy"]
    assert last["eval/action_error_ratio"] == pytest.approx(np.mean(entries))
    assert json.loads((alone / "status.json").read_text())["state"] == "finished"
    spec = load_spec(checkpoints(alone)[-1])
    assert spec.observation == {"image/top": ((3, 12, 20), "uint8"), "state": ((4,), "float32")}


def test_eval_of_such_a_run_gives_the_same_error(alone, capsys):
    assert main(["eval", str(alone)]) == 0
    shown = capsys.readouterr().out
    assert "4 held-out episodes, greedy actions" in shown and "ratio of squares" in shown
    content = json.loads((alone / "eval.json").read_text())["action_error"]
    assert content["ratio"] == pytest.approx(evaluations(alone)[-1]["eval/action_error_ratio"], rel=1e-4)
    assert content["entries"].keys() == {"x", "y"}
    assert main(["eval", str(alone), "--videos", "2"]) == 2
    assert "has no simulator: greedy actions are compared with demonstrated ones" in capsys.readouterr().err


def test_the_error_is_that_of_the_saved_predictions(alone, v21):
    """By hand: the policy acts at every step of the held-out episodes 5, 15, 25 and 35."""
    policy, recorded = load_policy(alone), episodes(40)
    config = load_config(checkpoints(alone)[-1] / "config.yaml", inherit=False)
    datasets, spec = read_datasets(config.imitate), load_spec(checkpoints(alone)[-1])
    assert make_imitation_env(config, datasets).spec == spec
    (demos,) = open_demonstrations(config, datasets, spec, policy)
    squares, means, train = [], [], np.concatenate([e["action"] for n, e in enumerate(recorded) if n % 10 != 5])
    for number in (5, 15, 25, 35):
        with torch.no_grad():
            predicted = policy.act(demos.episode(number).select("observation"))["action"][:, 0].numpy()
        # -1 and 1 are 0 and 10
        squares.append((predicted * 5 + 5 - recorded[number]["action"]) ** 2)
        means.append((recorded[number]["action"] - train.mean(0)) ** 2)
    found = ActionError.run(config, policy, "cpu", spec)
    np.testing.assert_allclose(found.error, np.concatenate(squares).mean(0), rtol=1e-3)
    np.testing.assert_allclose(found.baseline, np.concatenate(means).mean(0), rtol=1e-3)
    expected = np.mean(np.concatenate(squares).mean(0) / np.concatenate(means).mean(0))
    assert found.ratio == pytest.approx(expected, rel=1e-3)


def test_its_weights_act_and_learn_in_an_env_with_the_same_shapes(v21, tmp_path, capsys):
    out = tmp_path / "run"
    keys = (
        "imitate.keys={observation.state: state, observation.environment_state: state, observation.images.top: ignore,"
    )
    words = ["train", "imitate", f"imitate.demos={v21}", f"{keys} task: ignore}}", "env.action_low=[0,0]"]
    assert main([*words, "env.action_high=[10,10]", "--output", str(out), *LONG]) == 0
    capsys.readouterr()
    assert main(["eval", str(out), "env.name=foreign_datasets:ReachEnv", "--episodes", "40", "rollout.n_envs=8"]) == 0
    scores = json.loads((out / "eval_name-foreign_datasets-ReachEnv.json").read_text())["scores"]
    rates = {who: score["foreign_datasets:ReachEnv"]["success"]["rate"] for who, score in scores.items()}
    assert rates["policy"] > 0.9 > 0.6 > rates["random"]
    limited = ["env.name=foreign_datasets:ReachEnv", "rollout.max_episode_steps=10", "--episodes", "2"]
    assert main(["eval", str(out), *limited, "rollout.n_envs=2"]) == 0
    words = ["train", "finetune", f"pretrained={out}", "env.name=foreign_datasets:ReachEnv", "rollout.n_envs=2"]
    words += ["rollout.steps=8", "ppo.mini_batch_size=8", "training.iterations=1", "evaluation.episodes=2"]
    assert main([*words, "--output", str(tmp_path / "tuned")]) == 0
    assert "starts from the weights of" in capsys.readouterr().err
    # other units of actions have the same shape
    assert main([*words, "env.kwargs={scale: 4}", "--output", str(tmp_path / "other")]) == 2
    assert "action_high was [10.0, 10.0] and is [4.0, 4.0]" in capsys.readouterr().err
    assert main(["train", "finetune", f"pretrained={out}", "--output", str(tmp_path / "none")]) == 2
    assert "env.name=dataset has no simulator, so no policy can act in it" in capsys.readouterr().err


def test_a_run_on_a_dataset_is_resumed_exactly(hdf5, tmp_path):
    common = ["train", "imitate", f"imitate.demos={hdf5}", "imitate.keys={obs/view_image: ignore}", *SHORT[:-2]]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    more = ["training.iterations=4", "imitate.lr_schedule=constant"]
    assert main([*common, *more, "--output", str(whole)]) == 0
    assert main([*common, *more, "training.iterations=2", "--output", str(halves)]) == 0
    assert main([*common, *more, "--output", str(halves)]) == 0
    first, second = (load_policy(folder).state_dict() for folder in (whole, halves))
    assert all(torch.equal(first[name], second[name]) for name in first)
    # the split of the file
    assert evaluations(whole)[-1]["eval/episodes"] == 3


def test_a_flow_policy_and_its_instructions_on_a_dataset_alone(v21, tmp_path):
    out = tmp_path / "run"
    words = ["train", "imitate", f"imitate.demos={v21}", "imitate.keys={observation.images.top: ignore}", *SHORT]
    words += ["policy.name=flow", "policy.horizon=4", "rollout.action_steps=2", "policy.language_features=4"]
    assert main([*[w for w in words if "policy.hidden" not in w], "--output", str(out)]) == 0
    spec = load_spec(checkpoints(out)[-1])
    assert spec.observation["instruction"] == ((256,), "uint8") and spec.observation["state"] == ((4,), "float32")
    assert evaluations(out)[-1]["eval/action_error_ratio"] > 0


def test_a_dataset_with_other_shapes_than_the_first_is_refused(v21, hdf5, tmp_path, capsys):
    words = ["train", "imitate", f"imitate.demos=[{hdf5},{v21}]", "--output", str(tmp_path / "run"), *SHORT]
    assert main(words) == 2
    assert (
        "entries of observation.state: expected 4, found 2; vectors: observation.state [2]" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_resumed_with_another_order_of_the_state(v21, tmp_path, capsys):
    common = ["train", "imitate", f"imitate.demos={v21}", "--output", str(tmp_path / "run"), *SHORT]
    keys = ["observation.state: state", "observation.environment_state: state", "observation.images.top: ignore"]
    assert main([*common, f"imitate.keys={{{', '.join(keys)}}}"]) == 0
    keys[:2] = keys[1::-1]
    assert main([*common, f"imitate.keys={{{', '.join(keys)}}}"]) == 2
    assert "imitate.keys: ['observation.state: state', 'observation.environment_state" in capsys.readouterr().err
    more = ["--output", str(tmp_path / "other"), f"pretrained={tmp_path / 'run'}"]
    assert main([*common[:3], *more, *SHORT, f"imitate.keys={{{', '.join(keys)}}}"]) == 2
    assert "the state was state [2], environment_state [2] and is environment_state" in capsys.readouterr().err


# ---- in an env


@pytest.mark.parametrize("source", ["v21", "hdf5"])
def test_foreign_demonstrations_reach_success_in_a_gymnasium_env(source, request, tmp_path, capsys):
    """The env has other units, no words, and its image has another shape; robomimic's keys have its names."""
    folder, out = request.getfixturevalue(source), tmp_path / "run"
    keys = [KEYS] if source == "v21" else []
    words = ["train", "imitate", f"imitate.demos={folder}", *ENV, "env.kwargs={image: true}", *keys, *LONG]
    assert main([*words, "rollout.n_envs=8", "evaluation.episodes=40", "--output", str(out)]) == 0
    row = RowFile(out / "evaluations.jsonl").read()[-1]
    assert row["eval/success_rate"] > 0.9 > 0.6 > row["eval/random_success_rate"]
    err = capsys.readouterr().err
    assert (
        "image/view is scaled from 48 x 80 to 24 x 40" in err
        and "the env does not observe it" in err
        or source != "v21"
    )


@pytest.mark.parametrize(
    ("env", "more", "message"),
    [
        ("{fps: 10}", [], "frames/s: expected 10.0, found 20; set imitate.fps=resample (for absolute actions) or "),
        ("{fps: 10}", ["imitate.fps=resample"], "steps are resampled from 20 to 10 per second"),
        ("{fps: 10}", ["imitate.fps=ignore"], "20 steps/s"),
        ("{fps: null}", [], "20 steps/s"),
        ("{text: true}", [], "task: text, 3 different -> instruction"),
        ("{scale: 4.0}", [], "the env accepts 0 to 4: it clips "),
    ],
)
def test_what_is_done_about_a_difference_is_logged(v21, tmp_path, capsys, env, more, message):
    words = ["train", "imitate", f"imitate.demos={v21}", *ENV, f"env.kwargs={env}", KEYS, *SHORT, *more]
    code = main([*words, "--output", str(tmp_path / "run")])
    assert message in capsys.readouterr().err
    assert code == (2 if "expected" in message else 0)


def test_texts_of_the_dataset_are_read_by_the_policy(v21):
    env = {"name": "foreign_datasets:ReachEnv", "kwargs": {"text": True}}
    keys = {"observation.state": "state", "observation.environment_state": "state"}
    config = load_config({"phase": "imitate", "imitate": {"demos": str(v21), "keys": keys}, "env": env}, inherit=False)
    datasets = read_datasets(config.imitate)
    env = make_imitation_env(config, datasets)
    chunks = ActionChunks(open_demonstrations(config, datasets, env.spec), 1, env.spec)
    rows = chunks.observation(chunks.first_steps[:4])["instruction"]
    texts = [bytes(row.numpy()).rstrip(b"\0").decode() for row in rows]
    assert texts == [*TASKS, TASKS[0]]


def test_an_env_with_words_needs_words(hdf5, tmp_path, capsys):
    words = ["train", "imitate", f"imitate.demos={hdf5}", *ENV, "env.kwargs={text: true}", *SHORT]
    assert main([*words, "--output", str(tmp_path / "run")]) == 2
    assert "the env observes an instruction, and the dataset has none; set imitate.keys" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [{"imitate.demos": "nowhere"}, {"env.action_low": [0.0]}, {"env.action_low": [11, 11]}]
)
def test_impossible_settings_are_refused_in_one_sentence(v21, given):
    settings = {"phase": "imitate", "imitate.demos": str(v21), "env.name": "dataset"} | given
    with pytest.raises(UserError, match="is not a folder|has 1 numbers; an action|exceeds env.action_high"):
        spec_of(settings)


def test_check_prints_what_becomes_of_each_key(v21, hdf5, capsys):
    assert main(["check", str(v21)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "  observation.environment_state: float64 [2] -> state[2:4]" in shown
    assert "  observation.images.top: images 48 x 80 -> image/top" in shown
    assert shown[-1].startswith("ok: imitation in dataset reads image/top [3, 48, 80], state [4], instruction [256]")
    assert main(["check", str(hdf5), *ENV]) == 0
    assert "ok: imitation in foreign_datasets:ReachEnv reads state [4], and an action of 2" in capsys.readouterr().out
    assert main(["check", str(v21), *ENV]) == 2
    assert (
        "vectors: observation.state [2], observation.environment_state [2]; set imitate.keys="
        in capsys.readouterr().err
    )


# ---- units, splits and several datasets


SMALL = ["imitate.keys={obs/view_image: ignore, task: ignore}", *SHORT]


def test_bounds_are_those_of_the_training_episodes_for_each_entry(tmp_path):
    """x is in [-1, 1] but for rounding; y is largest in episode 1, which is held out."""
    recorded = episodes(4)
    for number, episode in enumerate(recorded):
        episode["action"] = np.stack([np.full(len(episode["action"]), 1.0005), episode["action"][:, 1]], axis=1)
        episode["action"][0, 1] = 50 if number == 1 else -3
    file = robomimic(tmp_path / "x.hdf5", recorded, valid=(1,))
    settings = {"phase": "imitate", "imitate.demos": str(file)}
    used = np.concatenate([episode["action"][:, 1] for n, episode in enumerate(recorded) if n != 1])
    spec = spec_of(settings)
    assert spec.action_low == (-1, -3) and spec.action_high == (1, pytest.approx(used.max()))
    highest = pytest.approx(recorded[0]["action"][:, 1].max())
    assert spec_of(settings | {"imitate.episodes": 1}).action_high == (1, highest)


def test_bounds_of_our_own_datasets_cannot_be_given(v21, monkeypatch):
    own = replace(read_dataset(v21), extras={"control_mode": None, "env": {}})
    monkeypatch.setattr("sparring.phases.demonstrations.read_dataset", lambda folder: own)
    settings = {"phase": "imitate", "imitate.demos": str(v21), "env.name": "dataset"}
    spec = spec_of(settings)
    assert (spec.action_low, spec.action_high) == ((-1, -1), (1, 1))
    with pytest.raises(DatasetError, match=r"are in \[-1, 1\]; leave them out"):
        spec_of(settings | {"env.action_high": [10.0, 10.0]})


def test_a_changed_dataset_is_neither_evaluated_nor_trained_on_further(tmp_path, capsys):
    file, out = robomimic(tmp_path / "x.hdf5", episodes(12)), tmp_path / "run"
    words = ["train", "imitate", f"imitate.demos={file}", *SMALL, "--output", str(out)]
    assert main(words) == 0
    assert main(["eval", str(out)]) == 0
    assert main(["eval", str(out), "env.action_high=[20,20]"]) == 2
    assert "env.action_high: cannot be changed after training" in capsys.readouterr().err
    # larger actions in a training episode of the same length: the units stay those of the run
    before = json.loads((out / "eval.json").read_text())["action_error"]["entries"]
    with h5py.File(file, "a") as opened:
        actions = opened["data/demo_0/actions"]
        actions[0] = 90
    assert main(["eval", str(out)]) == 0
    after = json.loads((out / "eval.json").read_text())["action_error"]["entries"]
    assert [after[name]["error"] for name in after] == pytest.approx([before[name]["error"] for name in before])
    robomimic(file, episodes(13))
    capsys.readouterr()
    for command in (["eval", str(out)], [*words, "training.iterations=2"]):
        assert main(command) == 2
        assert "12 episodes of" in (shown := capsys.readouterr().err) and "and has 13 episodes of" in shown


def test_evaluated_episodes_are_spread_over_all_held_out_ones(v21, tmp_path):
    """By hand: 2 of the held-out episodes 5, 15, 25 and 35 are 15 and 35."""
    settings = {"env.action_low": [0, 0], "env.action_high": [10, 10], "evaluation.episodes": 2, "policy.hidden": [8]}
    config = load_config({"phase": "imitate", "imitate.demos": str(v21), "imitate.keys": {"task": "ignore"}} | settings)
    phase = Imitate.from_config(config, Distributed())
    found = ActionError.of(phase.model, phase.held_out, phase.chunks, phase.env.spec, config, torch.device("cpu"))
    mean = np.concatenate([e["action"] for n, e in enumerate(episodes(40)) if n % 10 != 5]).mean(0)
    squares = np.concatenate([(episodes(40)[number]["action"] - mean) ** 2 for number in (15, 35)])
    np.testing.assert_allclose(found.baseline, squares.mean(0), rtol=1e-3)


def test_a_memory_is_computed_for_the_needed_episodes_only(hdf5):
    class Counting:
        memory_size, chunk, steps = 1, 1, 0

        def remember(self, td):
            self.steps += len(td)
            return td["memory", "policy"] + 1

    config = load_config({"phase": "imitate", "imitate.demos": str(hdf5)})
    datasets = read_datasets(config.imitate)
    spec = replace(make_imitation_env(config, datasets).spec, observation={"state": ((4,), "float32")})
    chunks, policy = ActionChunks([Demonstrations(hdf5)], 1, spec), Counting()
    memory = chunks.memory(policy, torch.device("cpu"), torch.tensor([1, 4]))[:, 0]
    lengths = chunks.episode_lengths
    assert policy.steps == lengths[1] + lengths[4]
    for episode, length in enumerate(lengths.tolist()):
        first = int(chunks.first_steps[episode])
        expected = list(range(length)) if episode in (1, 4) else [0] * length
        assert memory[first : first + length].tolist() == expected


def test_the_env_of_pretrained_weights_is_kept(v21, tmp_path):
    words = ["train", "imitate", f"imitate.demos={v21}", *ENV, "env.kwargs={image: true}", KEYS, *SHORT]
    assert main([*words, "--output", str(tmp_path / "first")]) == 0
    more = [f"pretrained={tmp_path / 'first'}", "policy.normalize_actions=true", KEYS, *SHORT]
    assert main([*words[:3], *more, "--output", str(tmp_path / "second")]) == 0
    assert load_config(tmp_path / "second/config.yaml", inherit=False).env.name == "foreign_datasets:ReachEnv"


def test_a_key_may_be_missing_in_one_of_several_datasets(v21, hdf5, tmp_path):
    keys = {"observation.state": "state", "observation.environment_state": "state", "obs/view_image": "ignore"}
    keys |= {"observation.images.top": "ignore"}
    config = {"phase": "imitate", "imitate.demos": [str(v21), str(hdf5)], "imitate.keys": keys}
    assert spec_of(config).observation["state"] == ((4,), "float32")
    with pytest.raises(DatasetError, match="has no such key"):
        spec_of(config | {"imitate.keys": keys | {"nothing": "state"}})


def test_an_env_without_a_rate_cannot_resample(v21, tmp_path, capsys):
    words = ["train", "imitate", f"imitate.demos={v21}", *ENV, "env.kwargs={fps: null}", KEYS, *SHORT]
    assert main([*words, "imitate.fps=resample", "--output", str(tmp_path / "run")]) == 2
    assert "states no rate; set imitate.fps=ignore" in capsys.readouterr().err


def test_check_refuses_what_training_refuses(hdf5, tmp_path, capsys):
    assert main(["check", str(robomimic(tmp_path / "x.hdf5", episodes(1)))]) == 2
    assert "has 1 episode, and 1 would be held out" in capsys.readouterr().err
    assert main(["check", str(hdf5), *ENV, "env.kwargs={text: true}"]) == 2
    assert "the env observes an instruction, and the dataset has none" in capsys.readouterr().err
