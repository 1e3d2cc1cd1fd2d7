"""Episodes whose numbers identify their episode and step."""

import torch
from tensordict import TensorDict


def numbered_episode(number: int, steps: int, memory: bool = True) -> TensorDict:
    """[T]; state: (episode, step); image: 7 * episode + step (mod 256); reward and memory: 1000 * episode + step."""
    # [T+1]
    step = torch.arange(steps + 1)
    image = ((7 * number + step) % 256).to(torch.uint8)[:, None, None, None].expand(-1, 3, 4, 4)
    state = torch.stack([torch.full_like(step, number), step], 1).float()
    code = (1000.0 * number + step)[:steps]
    last = torch.arange(steps) == steps - 1
    observation = TensorDict({"image": {"head": image}, "state": state}, [steps + 1])
    episode = {
        "observation": observation[:-1],
        "action": code[:, None, None].expand(-1, 2, 3) / 10,
        "is_first": torch.arange(steps) == 0,
        "version": torch.full((steps,), number),
        "next": {
            "observation": observation[1:],
            "reward": code[:, None].expand(-1, 2),
            "terminated": last,
            "success": last & (number % 2 == 0),
        },
    }
    if memory:
        episode["memory"] = {"world_model": code[:, None].expand(-1, 5)}
    return TensorDict(episode, [steps])


def assert_equal(got: TensorDict, expected: TensorDict) -> None:
    """Same keys, dtypes and values."""
    keys = sorted(map(str, got.keys(True, True)))
    assert keys == sorted(map(str, expected.keys(True, True)))
    assert got.batch_size == expected.batch_size
    for key in expected.keys(True, True):
        assert got[key].dtype == expected[key].dtype, key
        assert torch.equal(got[key], expected[key]), key
