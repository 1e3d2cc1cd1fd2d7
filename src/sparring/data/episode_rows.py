"""An episode as a TensorDict taken apart into the rows that are stored, and refused where it is none."""

import numpy as np
import torch
from tensordict import TensorDict

from sparring.errors import UserError


def rows_of(episode: TensorDict) -> tuple[int, dict[str, list[np.ndarray]]]:
    """(T, name -> its rows, in parts): T+1 rows of an observation, T of all else."""
    (steps,) = episode.batch_size
    if not steps:
        raise UserError("an episode without a step cannot be stored")
    rows = {}
    for key, value in episode.exclude(("next", "observation")).items(True, True):
        key = key if isinstance(key, tuple) else (key,)
        name = "/".join(key)
        if value.dtype == torch.bfloat16:
            raise UserError(f"{name} is bfloat16, which cannot be stored; append it as float16 or float32")
        values = value.numpy(force=True)
        rows[name] = [values]
        if key[0] == "observation":
            following = episode.get(("next", *key), None)
            if following is None:
                raise UserError(f"the episode has no 'next/{name}', whose last row is its last observation")
            following = following.numpy(force=True)
            _check_order(values, following, name)
            rows[name].append(following[-1:])
    return steps, rows


def _check_order(values: np.ndarray, following: np.ndarray, name: str) -> None:
    if not np.array_equal(values[1:], following[:-1]):
        if values.dtype.kind == "f" and np.isnan(values).any():
            raise UserError(f"{name} holds NaN, which cannot be stored; mend the env, or leave the episode out")
        raise UserError(
            f"{name}: row t+1 is not row t of next/{name}, so these are not the steps of one episode in time order; "
            "append each episode by itself"
        )
