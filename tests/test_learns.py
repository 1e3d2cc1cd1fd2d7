"""Default settings learn the built-in task in seconds."""

from sparring.config.schema import load_config
from sparring.runs.run import Run


def test_policy_learns_reach_d0_and_random_actions_fail(tmp_path):
    config = load_config(
        {
            "output": str(tmp_path),
            "training": {"total_timesteps": 75_000},
            "evaluation": {"episodes": 50},
            "rollout": {"render_episodes": 1},
            "logging": {"console_level": "ERROR", "video_share": 1.0},
        }
    )
    run = Run(config)
    assert run.run()
    scores = run.evaluate().scores
    assert scores["policy"]["reach_d0"].success.rate >= 0.8
    assert scores["random"]["reach_d0"].success.rate <= 0.2
    # one of the first rollout, one of the evaluation
    for kind in ("rollout", "episode"):
        assert len(list((tmp_path / "videos").glob(f"{kind}_*.mp4"))) == 1
        assert len(list((tmp_path / "samples").glob(f"{kind}_*.png"))) == 1
