"""Two runs on the same episodes: hand-computed statistics, coverage of the intervals, and verdicts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from doubles import CountingBackend, LinearPolicy

from sparring.cli.main import main
from sparring.collect.camera import Episode
from sparring.config.schema import load_config
from sparring.envs.env import Env, make_env
from sparring.errors import UserError
from sparring.evaluation.compare import (
    MAY_DIFFER,
    Comparison,
    _Difference,
    _in_order,
    _mcnemar,
    _mean_difference,
    _Measured,
    _student_quantile,
    _success_difference,
)
from sparring.evaluation.of_run import episode_differences
from sparring.evaluation.play import play


def pairs(both: int, only_a: int, only_b: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    a = [True] * (both + only_a) + [False] * (only_b + neither)
    b = [True] * both + [False] * only_a + [True] * only_b + [False] * neither
    return np.array(a), np.array(b)


# ---- statistics


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [(0, 0, 1), (1, 0, 0.5), (5, 0, 1 / 32), (0, 6, 1 / 64), (12, 2, (2 * (1 + 14) + 91) / 2**14), (7, 7, 1)],
)
def test_mcnemars_mid_p_value(only_a, only_b, p):
    assert _mcnemar(only_a, only_b) == pytest.approx(p)


def test_newcombes_interval_matches_a_published_example():
    """The worked example of Altman et al., Statistics with confidence (2000), table 6.2: 0.011 to 0.226."""
    found = _success_difference(*pairs(14, 5, 0, 22))
    assert found.effect == pytest.approx(5 / 41)
    assert (round(found.low, 3), round(found.high, 3)) == (0.011, 0.226)
    assert found.p == pytest.approx(1 / 32) and found.is_significant
    swapped = _success_difference(*reversed(pairs(14, 5, 0, 22)))
    assert (swapped.effect, swapped.low, swapped.high) == pytest.approx((-found.effect, -found.high, -found.low))


def test_equal_results_have_no_difference_but_an_interval():
    found = _success_difference(*pairs(100, 0, 0, 0))
    # the margins combine those of two Wilson intervals of 100 of 100, of which one side is 0
    assert (found.effect, found.p) == (0, 1) and found.high == -found.low == pytest.approx(0.037, abs=1e-4)


def test_sign_flip_test_and_student_interval():
    """With three differences of 1, two of eight sign flips are as extreme; with a mean of 0 all are."""
    assert _mean_difference(np.ones(3), np.zeros(3)).p == pytest.approx(0.25, abs=0.02)
    assert _mean_difference(np.array([1.0, 2.0, -3.0]), np.zeros(3)).p == 1
    # gaps 0, 2, 4: mean 2, deviation 2, and t of 2 degrees of freedom
    found = _mean_difference(np.array([1.0, 3.0, 5.0]), np.ones(3))
    assert (found.low, found.high) == pytest.approx(
        (2 - _student_quantile(2) * 2 / 3**0.5, 2 + _student_quantile(2) * 2 / 3**0.5)
    )
    same = _mean_difference(np.arange(4.0), np.arange(4.0))
    assert (same.effect, same.low, same.high, same.p) == (0, 0, 0, 1)


@pytest.mark.parametrize(("freedom", "quantile"), [(5, 2.571), (9, 2.262), (29, 2.045), (99, 1.984)])
def test_student_quantiles_match_tables(freedom, quantile):
    assert _student_quantile(freedom) == pytest.approx(quantile, abs=5e-3)


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_rewards_that_are_not_finite_are_refused(odd):
    with pytest.raises(UserError, match="1 of 3 episodes .* not finite"):
        _mean_difference(np.array([1.0, odd, 2.0]), np.zeros(3))


def test_success_test_has_its_level_and_agrees_with_the_interval():
    """Two policies with equal success probability, 40 episodes."""
    rng, tries, alarms, edges = np.random.default_rng(0), 2000, 0, 0
    for a, b in rng.random((tries, 2, 40)) < 0.7:
        found = _success_difference(a, b)
        alarms += found.p < 0.05
        edges += found.is_borderline
    assert 0.03 <= alarms / tries <= 0.06 and edges / tries < 0.02


@pytest.mark.parametrize(("a", "b", "shared", "n"), [(0.8, 0.7, 0.5, 50), (0.95, 0.95, 0.5, 100), (0.99, 0.9, 0.0, 50)])
def test_success_interval_has_its_coverage(a, b, shared, n):
    rng, tries, covered = np.random.default_rng(0), 1000, 0
    for _ in range(tries):
        # a share of the episodes is equally hard for both
        for_a, own = rng.random((2, n))
        for_b = np.where(rng.random(n) < shared, for_a, own)
        found = _success_difference(for_a < a, for_b < b)
        covered += found.low <= a - b <= found.high
    assert 0.94 <= covered / tries <= 0.99


def test_reward_interval_has_its_coverage_and_the_test_its_level(monkeypatch):
    monkeypatch.setattr("sparring.evaluation.compare.FLIPS", 1000)
    rng, tries, covered, alarms = np.random.default_rng(0), 400, 0, 0
    for _ in range(tries):
        hard = rng.normal(0, 3, 60)
        found = _mean_difference(hard + rng.exponential(1, 60), hard + rng.exponential(1, 60) - 0.5)
        covered += found.low <= 0.5 <= found.high
        alarms += _mean_difference(hard + rng.normal(0, 1, 60), hard + rng.normal(0, 1, 60)).is_significant
    assert 0.93 <= covered / tries <= 0.97
    assert 0.02 <= alarms / tries <= 0.08


# ---- pairs


def test_episodes_are_paired_by_their_numbers():
    """Robot 0's episodes are ten times shorter, so all of them end before robot 1's first."""
    played, _ = play(LinearPolicy(), Env(CountingBackend((2, 20))), 5, seed=0)
    assert [episode.env for episode in played] == [0, 0, 0, 1, 1]
    assert [episode.env for episode in _in_order(played, 2)] == [0, 1, 0, 1, 0]
    first, second = Episode(0, 0, 1.0, 5, True), Episode(0, 0, 2.0, 5, True)
    assert _in_order([first, second], 1) == [first, second]


@pytest.mark.parametrize(
    "other",
    [
        {"cameras": ["head", "wrist"], "image_size": 32, "depth": True, "segmentation": True},
        {"cameras": ["head"], "points": 16, "control_mode": "delta_ee_pos", "action_scale": 2.0},
        {"object_state": "privileged", "video_renderer": "mujoco", "threads": 1},
        {"pad_state": 64, "pad_action": 12},
    ],
)
def test_initial_states_do_not_depend_on_observation_and_action_settings(other):
    assert {f"env.{key}" for key in other} <= set(MAY_DIFFER)
    env = {"task": ["lift_d2"], "domain_randomization": "all"}
    states = []
    for settings in (env, env | other):
        robots = make_env(load_config({"env": settings}).env, 4)
        robots.reset(3, "eval")
        states.append(robots.state())
        robots.close()
    for name in ("physics", "goal", "task", "phrasing", "seeds"):
        np.testing.assert_array_equal(states[0][name], states[1][name])


# ---- verdicts


def measured(effect: float, low: float, high: float, p: float) -> _Measured:
    return _Measured("success, %", 0.5 + effect, 0.5, _Difference(effect, low, high, p), "points of success", 100)


REWARD = _Measured("reward", 2.0, 1.0, _Difference(1.0, 0.5, 1.5, 0.0001), "reward")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([measured(0.12, 0.05, 0.19, 0.002)], "A is better: +12.0 points of success (95 % +5.0 to +19.0), p = 0.002"),
        ([measured(-0.12, -0.19, -0.05, 0)], "B is better: +12.0 points of success (95 % +5.0 to +19.0), p < 0.001"),
        (
            [measured(0.02, -0.04, 0.08, 0.61)],
            "no significant difference with 100 episodes: +2.0 points of success (95 % -4.0 to +8.0), p = 0.610; "
            "four times as many episodes would halve the interval",
        ),
        (
            [measured(0.02, -0.04, 0.08, 0.61), REWARD],
            "no significant difference with 100 episodes: +2.0 points of success (95 % -4.0 to +8.0), p = 0.610; "
            "four times as many episodes would halve the interval; by reward, A is better: +1.000 reward (95 % +0.500 "
            "to +1.500), p < 0.001",
        ),
        (
            [measured(0.12, 0.01, 0.23, 0.062)],
            "borderline with 100 episodes: +12.0 points of success (95 % +1.0 to +23.0), p = 0.062; only one of "
            "interval and p shows a difference; evaluate more episodes",
        ),
        (
            [replace(REWARD, more_is_better=False, unit="of the MSE ratio")],
            "B is better: -1.000 of the MSE ratio (95 % -1.500 to -0.500), p < 0.001",
        ),
    ],
)  # fmt: skip
def test_verdict_names_the_better_run_or_none(found, expected):
    assert Comparison("a", "b", 100, 0, found, same=False).verdict() == expected


# ---- the command

SIZES = ["--envs", "2", "rollout.steps=8", "threads=1", "device=cpu", "training.iterations=1", "evaluation.episodes=2"]
CARTPOLE = ["env.name=gym:CartPole-v1", "env.success_return=12"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs on CartPole with two seeds, with another success_return and with two limits, and one on Pendulum."""
    folder = tmp_path_factory.mktemp("runs")
    settings_of = {"one": ["seed=0"], "two": ["seed=1"], "easy": ["env.success_return=5"]}
    # CartPole's own limit is 500 steps
    settings_of |= {f"limit{steps}": [f"rollout.max_episode_steps={steps}"] for steps in (500, 400)}
    for name, settings in (settings_of | {"pendulum": ["env.name=gym:Pendulum-v1"]}).items():
        words = ["train", "finetune", *SIZES, *CARTPOLE, *settings, "evaluation.baseline=false"]
        assert main([*words, "rollout.render_episodes=0", "--output", str(folder / name)]) == 0
    return folder


def test_comparison_of_a_run_with_itself_finds_no_difference(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    assert main(["compare", "one", "one", "--episodes", "8"]) == 0
    states = capsys.readouterr()
    assert "no difference: A and B have the same results in all 8 episodes" in states.out
    assert "on the same 8 held-out episodes of seed 0 (gym:CartPole-v1)" in states.err


def test_comparison_writes_a_table_a_verdict_and_a_file(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    assert main(["compare", "one", "two", "--episodes", "20", "--seed", "5", "--json", "out.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["20 held-out episodes, each run with both policies", "A  one", "B  two"]
    written = json.loads((runs / "out.json").read_text())
    assert (written["episodes"], written["seed"], written["split"]) == (20, 5, "eval")
    assert [found["name"] for found in written["measured"]] == ["success, %", "reward"]
    assert lines[-2:] == [written["verdict"], "numbers: out.json"]
    # swapped runs give swapped results
    assert main(["compare", "two", "one", "--episodes", "20", "--seed", "5", "--json", "swapped.json"]) == 0
    swapped = json.loads((runs / "swapped.json").read_text())
    for found, other in zip(written["measured"], swapped["measured"], strict=True):
        assert (found["a"], found["b"]) == (other["b"], other["a"])
        assert found["difference"]["effect"] == pytest.approx(-other["difference"]["effect"])


def test_comparison_and_eval_give_equal_results(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    assert main(["compare", "one", "two", "--episodes", "10", "--json", "out.json"]) == 0
    both = json.loads((runs / "out.json").read_text())["measured"]
    for who, path in (("a", "one"), ("b", "two")):
        assert main(["eval", path, "--episodes", "10", "--seed", "0", "evaluation.baseline=false"]) == 0
        (score,) = json.loads((runs / path / "eval.json").read_text())["scores"]["policy"].values()
        assert [found[who] for found in both] == pytest.approx([score["success"]["rate"], score["reward"]])


def test_eval_both_reports_greedy_and_sampled_actions(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    assert main(["eval", "one", "--episodes", "6", "--both", "--json", "both.json"]) == 0
    assert "6 held-out episodes, greedy and sampled actions" in capsys.readouterr().out
    scores = json.loads((runs / "both.json").read_text())["scores"]
    assert list(scores) == ["policy", "policy, sampled"]
    assert main(["eval", "one", "--episodes", "6", "--stochastic", "--json", "sampled.json"]) == 0
    assert json.loads((runs / "sampled.json").read_text())["scores"]["policy"] == scores["policy, sampled"]
    with pytest.raises(SystemExit):
        main(["eval", "one", "--both", "--stochastic"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["one", "easy"], "give both the same settings, e.g. env.success_return=12"),
        (["one", "pendulum"], "A was trained in 'gym:CartPole-v1', B in 'gym:Pendulum-v1'; the two cannot run"),
        (["one", "two", "--episodes", "5"], "give --episodes 6 or more"),
        (["one", "nowhere"], "'nowhere' does not exist"),
        (["one", "limit400"], "e.g. rollout.max_episode_steps=null:\n  rollout.max_episode_steps: A null, B 400"),
        (["one", "two", "--json", "no/where.json"], "'no/where.json': cannot write there (No such file or directory)"),
        (["one", "two", "--json", "one"], "'one': cannot write there (Is a directory); give --json FILE"),
        (["one", "two", "policy.hidden=[4]"], "policy.hidden: cannot be changed after training"),
        (["one", "two", "--world-model"], "'one' is a run of `sparring train finetune`"),
    ],
)  # fmt: skip
def test_invalid_comparisons_are_refused(runs, capsys, monkeypatch, words, expected):
    monkeypatch.chdir(runs)
    # before the first episode
    monkeypatch.setattr("sparring.evaluation.compare.play", lambda *_: pytest.fail("played"))
    assert main(["compare", *words]) == 2
    assert expected in capsys.readouterr().err


def test_override_makes_the_episodes_of_two_runs_equal(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    assert main(["compare", "one", "easy", "--episodes", "6", "env.success_return=12"]) == 0
    # both trained with the same seed and settings
    assert "no difference: A and B have the same results in all 6 episodes" in capsys.readouterr().out


def test_explicit_default_limit_does_not_change_episodes(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    assert main(["compare", "one", "limit500", "--episodes", "6"]) == 0
    assert "no difference: A and B have the same results in all 6 episodes" in capsys.readouterr().out


def test_common_limit_differs_from_the_limits_of_tasks():
    def config(limit):
        return load_config(
            {"env": {"task": ["reach_d0", "lift_d0"]}, "rollout": {"n_envs": 2, "max_episode_steps": limit}}
        )

    # the tasks' own limits are 50 and 60
    assert episode_differences(config(None), config(60), ()) == ["rollout.max_episode_steps"]
    assert episode_differences(config(60), config(60), ()) == []


def test_evaluation_with_overrides_is_written_to_another_file(runs, capsys, monkeypatch):
    monkeypatch.chdir(runs)

    def evaluated(*words):
        assert main(["eval", "one", "--episodes", "4", "evaluation.baseline=false", *words]) == 0
        out = capsys.readouterr().out
        file = out[out.index("numbers: ") :].split()[1]
        return out.splitlines()[0], file, json.loads(Path(file).read_text())

    for words in ([], ["rollout.max_episode_steps=500", "env.vectorize=process", "env.workers=1"]):
        head, file, own = evaluated(*words)
        assert (
            file == "one/eval.json" and own["settings"] == {} and head.endswith("4 held-out episodes, greedy actions")
        )
        assert (own["checkpoint"], own["how"]) == ("one/checkpoint-1", "greedy actions")
    head, file, other = evaluated("env.success_return=5")
    assert file == "one/eval_success_return-5.0.json" and other["settings"] == {"env.success_return": 5.0}
    assert head.endswith("greedy actions, with env.success_return=5.0")
    assert json.loads((runs / "one/eval.json").read_text()) == own
