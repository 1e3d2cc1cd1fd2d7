"""A policy that fails to decide when a file says so; the environment variable FAILING_POLICY names the file."""

import os
import time
from pathlib import Path

from tensordict import TensorDict

from sparring.policies.actor_critic import ActorCritic


class FailingPolicy(ActorCritic):
    def act(self, td: TensorDict) -> TensorDict:
        word = Path(os.environ["FAILING_POLICY"])
        if word.exists():
            if word.read_text() == "raise":
                raise ZeroDivisionError("nothing comes to mind")
            time.sleep(600)
        return super().act(td)
