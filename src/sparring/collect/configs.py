"""The `rollout` section. Torch-free."""

from pydantic import Field

from sparring.config import Section


class RolloutConfig(Section):
    """How experience is collected."""

    n_envs: int = Field(16, gt=0, description="robots per process (per GPU)")
    steps: int = Field(128, gt=0, description="decisions of each robot between two updates")
    max_episode_steps: int | None = Field(None, gt=0, description="time limit of an episode; null: the task's own")
    action_steps: int = Field(1, gt=0, description="env steps per decision: the length of an action chunk")
    render_episodes: int = Field(2, ge=0, description="episodes of each evaluation that are recorded as videos")
