"""Films show whole episodes, of whom they say, and cost nothing where none is wanted."""

import numpy as np
from doubles import CountingBackend, LinearPolicy

from sparring.collect.collector import Collector
from sparring.data.rollout import RolloutBuffer
from sparring.envs.env import Env
from sparring.run import Run
from sparring.tree import load_config


class Drawn(CountingBackend):
    """A picture's only pixel is 10 * episode + step."""

    drawn = 0

    def reset(self, seeds):
        self.recorded = []
        return super().reset(seeds)

    def step(self, action):
        before = self.episode * 10 + self.count
        step = super().step(action)
        for env in self.recorded:
            self.drawn += int(step.executed[env])
            step.frames[env] = [_pixel(before[env] + k) for k in range(1, step.executed[env] + 1)]
        return step

    def record(self, envs):
        self.recorded = list(envs)

    def render(self, env):
        self.drawn += 1
        return _pixel(self.episode[env] * 10 + self.count[env])


def _pixel(value):
    return np.full((1, 1, 3), value, np.uint8)


def collector(lengths, chunk=1, episodes=None):
    env = Env(Drawn(lengths))
    return Collector(env, LinearPolicy(chunk), seed=0, chunk=chunk, episodes=episodes), env.backend


def shown(films):
    return {film.episode.env: [int(frame[0, 0, 0]) for frame in film.frames] for film in films}


def test_an_episode_that_is_under_way_is_waited_for_and_rollouts_do_not_cut_films():
    collect, backend = collector((3, 5))
    buffer = RolloutBuffer(4)
    collect.collect(buffer)
    assert backend.drawn == 0
    # robot 0 is in step 1 of episode 1, robot 1 in step 4 of episode 0
    collect.camera.film(2)
    collect.collect(buffer)
    assert shown(collect.camera.drain()) == {}
    collect.collect(buffer)
    assert shown(collect.camera.drain()) == {0: [20, 21, 22, 23], 1: [10, 11, 12, 13, 14, 15]}
    drawn = backend.drawn
    collect.collect(buffer)
    assert backend.drawn == drawn and backend.recorded == []


def test_chunks_that_end_early_show_what_was_executed():
    collect, _ = collector((3, 5), chunk=2)
    collect.camera.film(1)
    collect.collect(RolloutBuffer(3))
    assert shown(collect.camera.drain()) == {0: [0, 1, 2, 3]}


def test_by_episodes_every_batch_is_filmed_from_its_start():
    collect, _ = collector((3, 5), episodes=1)
    collect.camera.film(9)
    collect.collect(RolloutBuffer(5))
    assert shown(collect.camera.drain()) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3, 4, 5]}


def run_of(folder, **rollout):
    settings = {
        "rollout": {"n_envs": 2, "steps": 4, "max_episode_steps": 4} | rollout,
        "env": {"threads": 1},
        "ppo": {"mini_batch_size": 8, "ppo_epochs": 1},
        "training": {"iterations": 4, "save_every": 2},
        "logging": {"console_level": "ERROR"},
    }
    return Run(load_config(settings | {"output": str(folder)}))


def trained(run):
    assert run.run()
    run.phase.env.close()


def test_a_run_films_when_it_starts_and_after_each_checkpoint(tmp_path):
    trained(run_of(tmp_path, render_episodes=1))
    videos = sorted(path.name for path in (tmp_path / "videos").iterdir())
    # episodes are as long as rollouts; the one of update 3 had begun when the checkpoint was written
    assert videos == ["rollout_000001_0.mp4", "rollout_000004_0.mp4"]
    assert (tmp_path / "samples" / "rollout_000004_0.png").exists()


def test_none_are_asked_for_and_nothing_is_drawn(tmp_path, monkeypatch):
    from sparring.envs.tabletop.backend import Tabletop

    monkeypatch.setattr(Tabletop, "render", lambda *_: 1 / 0)
    trained(run_of(tmp_path, render_episodes=0))
    assert not (tmp_path / "videos").exists()


def test_who_steps_a_phase_alone_collects_no_films(tmp_path):
    run = run_of(tmp_path, render_episodes=1)
    for _ in range(4):
        run.phase.step(run.fraction)
        run.save()
    run.phase.env.close()
    assert run.phase.drain_films() == [] and not (tmp_path / "videos").exists()
