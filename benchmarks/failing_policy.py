"""A policy that raises or hangs when a file demands it; the environment variable FAILING_POLICY names the file."""

import os
import time
from pathlib import Path

from tensordict import TensorDict

from sparring.policies.actor_critic import ActorCritic


class FailingPolicy(ActorCritic):
    def act(self, td: TensorDict) -> TensorDict:
        order = Path(os.environ["FAILING_POLICY"])
        if order.exists():
            if order.read_text() == "raise":
                raise ZeroDivisionError("nothing comes to mind")
            time.sleep(600)
        return super().act(td)
