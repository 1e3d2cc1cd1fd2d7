"""Videos show complete episodes of the named robot; without a request nothing is rendered."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from doubles import CountingBackend, LinearPolicy

from sparring.collect.camera import Camera
from sparring.collect.collector import Collector
from sparring.config.schema import load_config
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env, make_env
from sparring.evaluation.play import play
from sparring.runs.run import Run


class RendersCount(CountingBackend):
    """The only pixel of a frame is 10 * episode + step."""

    rendered = 0

    def reset(self, seeds):
        self.recorded = []
        return super().reset(seeds)

    def step(self, action):
        before = self.episode * 10 + self.count
        step = super().step(action)
        for env in self.recorded:
            self.rendered += int(step.executed[env])
            step.frames[env] = [_pixel(before[env] + k) for k in range(1, step.executed[env] + 1)]
        return step

    def record(self, envs):
        self.recorded = list(envs)

    def render(self, env):
        self.rendered += 1
        return _pixel(self.episode[env] * 10 + self.count[env])


def _pixel(value):
    return np.full((1, 1, 3), value, np.uint8)


def collector(lengths, chunk=1, episodes=None):
    env = Env(RendersCount(lengths))
    return Collector(env, LinearPolicy(chunk), seed=0, chunk=chunk, episodes=episodes), env.backend


def shown(videos):
    return {video.episode.env: [int(frame[0, 0, 0]) for frame in video.frames] for video in videos}


def test_video_starts_at_the_next_episode_and_spans_rollouts():
    collect, backend = collector((3, 5))
    buffer = RolloutBuffer(4)
    collect.collect(buffer)
    assert backend.rendered == 0
    # robot 0 is in step 1 of episode 1, robot 1 in step 4 of episode 0
    collect.camera.record_video(2)
    collect.collect(buffer)
    assert shown(collect.camera.drain()) == {}
    collect.collect(buffer)
    assert shown(collect.camera.drain()) == {0: [20, 21, 22, 23], 1: [10, 11, 12, 13, 14, 15]}
    rendered = backend.rendered
    collect.collect(buffer)
    assert backend.rendered == rendered and backend.recorded == []


def test_video_of_chunks_shows_executed_steps_only():
    collect, _ = collector((3, 5), chunk=2)
    collect.camera.record_video(1)
    collect.collect(RolloutBuffer(3))
    assert shown(collect.camera.drain()) == {0: [0, 1, 2, 3]}


def test_videos_of_episode_batches_start_with_the_batch():
    collect, _ = collector((3, 5), episodes=1)
    collect.camera.record_video(9)
    collect.collect(RolloutBuffer(5))
    assert shown(collect.camera.drain()) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3, 4, 5]}


class ValuesLater(LinearPolicy):
    """Computes values after the rollout, like most policies."""

    def act(self, td):
        return super().act(td).exclude("value")

    def complete(self, td):
        return super().complete(td).set("value", self._value(td))


@pytest.mark.parametrize("policy", [LinearPolicy, ValuesLater])
@pytest.mark.parametrize("steps", [2, 7])
def test_video_has_states_actions_rewards_and_values(policy, steps):
    """Chunks of two steps, the last one shortened; a rollout has `steps` decisions."""
    env = Env(RendersCount((3, 5)))
    collect = Collector(env, policy(2), seed=0, chunk=2)
    collect.camera.record_video(2)
    while len(collect.camera.complete) < 2:
        collect.collect(RolloutBuffer(steps))
    for video, robot, length in zip(collect.camera.drain(), (0, 1), (3, 5), strict=True):
        assert video.episode.env == robot and video.episode.steps == length
        assert video.rewards.tolist() == [100 * robot + t + 1 for t in range(length)]
        assert video.episode.reward == video.rewards.sum()
        decided_at = [0, 0, 2, 2, 4][:length]
        assert video.values.tolist() == [1000 * robot + t for t in decided_at]
        assert video.states.tolist() == [[robot, 0, t] for t in decided_at]
        acted = np.concatenate([actions[robot] for actions in env.backend.seen_actions])
        assert video.actions.tolist() == acted[:length].tolist()


def test_values_of_a_video_without_rollout_are_nan():
    env = Env(RendersCount((2, 2)))
    collect = Collector(env, ValuesLater(), seed=0)
    collect.camera.record_video(1)
    for _ in range(2):
        collect.decide()
    (video,) = collect.camera.drain()
    assert np.isnan(video.values).all() and video.rewards.tolist() == [1, 2]


class RendersLazily(RendersCount):
    """Renders frames lazily."""

    renders = 0

    def render_later(self):
        self.renders += 1
        return _pixel(9)

    def sketch(self, env):
        return self.render_later

    def step(self, action):
        return replace(super().step(action), frames={env: [self.render_later] for env in self.recorded})


def test_evaluation_shows_failures_first_and_renders_shown_videos_only():
    backend = RendersLazily((2, 2, 2, 2, 2, 2))
    _, videos = play(LinearPolicy(), Env(backend), episodes=6, seed=0, videos=4)
    # robots with odd numbers fail
    assert [video.episode.env for video in videos] == [1, 3, 5, 0] and videos[-1].episode.success
    assert backend.renders == 0
    assert len(videos[0].rendered().frames) == backend.renders == 3
    # without lazy rendering only the robots that are shown are recorded
    _, videos = play(LinearPolicy(), Env(RendersCount((2, 2, 2, 2))), episodes=4, seed=0, videos=2)
    assert [video.episode.env for video in videos] == [1, 0]
    assert play(LinearPolicy(), Env(RendersCount((2, 2))), episodes=2, seed=0)[1] == []


def test_tabletop_renders_frames_lazily():
    env = make_env(load_config({"env": {"threads": 1}}).env, 3, max_episode_steps=5)
    assert Camera(env).is_cheap and env.spec.video_cameras == ("head", "wrist")
    env.reset(0)
    env.backend.record([1])
    before, later = env.backend.render(1), env.backend.sketch(1)
    frames = env.backend.step(np.ones((3, 1, env.spec.action_dim))).frames
    after = env.backend.render(1)
    env.close()
    # each shows the step of its request, even after the env is closed
    assert np.array_equal(later(), before) and np.array_equal(frames[1][0](), after) and (before != after).any()


def test_frames_can_be_rendered_while_the_env_steps():
    env = make_env(load_config({"env": {"threads": 1, "cameras": ["head"], "image_size": 64}}).env, 4, 50)
    env.reset(0)
    env.backend.record([0, 1])
    rng, sketches = np.random.default_rng(0), []
    with ThreadPoolExecutor(1) as other:
        for _ in range(8):
            frames = env.backend.step(rng.uniform(-1, 1, (4, 1, env.spec.action_dim))).frames
            sketches += [(sketch, other.submit(sketch)) for sketch in (frames[0][0], frames[1][0])]
        images = [future.result() for _, future in sketches]
    assert all(np.array_equal(sketch(), picture) for (sketch, _), picture in zip(sketches, images, strict=True))
    assert len({picture.tobytes() for picture in images}) == 16
    env.close()


def run_of(folder, video_share=1.0, **rollout):
    settings = {
        "rollout": {"n_envs": 2, "steps": 4, "max_episode_steps": 4} | rollout,
        "env": {"threads": 1},
        "ppo": {"mini_batch_size": 8, "ppo_epochs": 1},
        "training": {"iterations": 4, "save_every": 2},
        "logging": {"console_level": "ERROR", "video_share": video_share},
    }
    return Run(load_config(settings | {"output": str(folder)}))


def trained(run):
    assert run.run()
    run.phase.env.close()


def test_run_records_at_its_start_and_after_each_checkpoint(tmp_path):
    trained(run_of(tmp_path, render_episodes=1))
    videos = sorted(path.name for path in (tmp_path / "videos").glob("*.mp4"))
    # episodes are as long as rollouts; that of update 3 began before the checkpoint was written
    assert videos == ["rollout_000001_0.mp4", "rollout_000004_0.mp4"]
    assert (tmp_path / "samples" / "rollout_000004_0.png").exists()


def test_short_run_exceeds_the_time_share_of_videos(tmp_path):
    trained(run_of(tmp_path, video_share=0.02, render_episodes=1))
    assert not (tmp_path / "videos").exists()


def test_run_without_videos_renders_nothing(tmp_path, monkeypatch):
    from sparring.envs.tabletop.backend import Tabletop

    monkeypatch.setattr(Tabletop, "render", lambda *_: 1 / 0)
    trained(run_of(tmp_path, render_episodes=0))
    assert not (tmp_path / "videos").exists()


def test_phase_without_run_records_no_videos(tmp_path):
    run = run_of(tmp_path, render_episodes=1)
    for _ in range(4):
        run.phase.step(run.fraction)
        run.save()
    run.phase.env.close()
    assert run.phase.drain_videos() == [] and not (tmp_path / "videos").exists()
