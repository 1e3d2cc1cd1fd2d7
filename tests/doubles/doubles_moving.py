"""A world small enough for a world model to learn in seconds: a bright square that actions push left and right."""

import torch
from tensordict import TensorDict

from sparring.contract import EnvSpec
from sparring.world_models.configs import TokenWorldModelConfig
from sparring.world_models.world_model import make_world_model

SIDE, PLACES = 32, 4
SPEC = EnvSpec(
    {
        "image/head": ((3, SIDE, SIDE), "uint8"),
        "image/wrist": ((3, SIDE, SIDE), "uint8"),
        "state": ((2,), "float32"),
        "task": ((), "int64"),
    },
    action_dim=1,
    task_names=("push", "push"),
    instructions=("push the square", "move it"),
)


def moving_windows(rows: int, steps: int, seed: int = 0, chunk: int = 2) -> TensorDict:
    """[B, T]: the square goes right where the action is positive, else left; the wrist camera sees it from below.

    Reward: 1 at the rightmost place. State: (place, 1).
    """
    generator = torch.Generator().manual_seed(seed)
    push = torch.randint(0, 2, (rows, steps), generator=generator) * 2 - 1
    place = torch.randint(0, PLACES, (rows,), generator=generator)
    places = [place]
    for t in range(steps):
        place = (place + push[:, t]).clamp(0, PLACES - 1)
        places.append(place)
    # [B, T+1]
    place = torch.stack(places, 1)
    observation = TensorDict(
        {
            "image": {"head": drawn(place, top=0), "wrist": drawn(place, top=16)},
            "state": torch.stack([place.float(), torch.ones_like(place).float()], -1),
            "task": torch.zeros_like(place),
        },
        [rows, steps + 1],
    )
    reward = torch.zeros(rows, steps, chunk)
    reward[..., -1] = (place[:, 1:] == PLACES - 1).float()
    no = torch.zeros(rows, steps, dtype=torch.bool)
    following = {"observation": observation[:, 1:], "reward": reward, "terminated": no, "success": no.clone()}
    first = no.clone()
    first[:, 0] = True
    action = push[:, :, None, None].float().expand(-1, -1, chunk, 1).contiguous()
    windows = {"observation": observation[:, :-1], "next": following, "action": action, "is_first": first, "mask": ~no}
    return TensorDict(windows, [rows, steps])


def drawn(place: torch.Tensor, top: int) -> torch.Tensor:
    """[...] -> uint8 [..., 3, 32, 32]: 8 x 8 bright pixels in a column of eight."""
    columns = torch.arange(SIDE) // 8 == place[..., None]
    rows = (torch.arange(SIDE) >= top) & (torch.arange(SIDE) < top + 8)
    square = (columns[..., None, :] & rows[:, None])[..., None, :, :]
    return (square.expand(*place.shape, 3, SIDE, SIDE) * 200 + 30).to(torch.uint8)


SIZES = {"channels": 16, "width": 32, "layers": 1, "heads": 2, "members": 2, "memory_channels": 4}


def make(seed: int = 0, spec=SPEC, **settings):
    torch.manual_seed(seed)
    settings = SIZES | {"tokenizer_steps": 0, "camera_dropout": 0.0} | settings
    return make_world_model(TokenWorldModelConfig(**settings), spec, chunk=2).eval()
