"""Images that a world model learns in seconds: a bright square that actions push left and right."""

import torch
from tensordict import TensorDict

from sparring.contract import EnvSpec
from sparring.world_models.configs import TokenWorldModelConfig
from sparring.world_models.world_model import make_world_model

SIDE, COLUMNS = 32, 4
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
    """[B, T]: a positive action moves the square right, a negative one left; the wrist camera draws it lower.

    Reward: 1 in the rightmost column. State: (column, 1).
    """
    generator = torch.Generator().manual_seed(seed)
    push = torch.randint(0, 2, (rows, steps), generator=generator) * 2 - 1
    column = torch.randint(0, COLUMNS, (rows,), generator=generator)
    columns = [column]
    for t in range(steps):
        column = (column + push[:, t]).clamp(0, COLUMNS - 1)
        columns.append(column)
    # [B, T+1]
    column = torch.stack(columns, 1)
    observation = TensorDict(
        {
            "image": {"head": drawn(column, top=0), "wrist": drawn(column, top=16)},
            "state": torch.stack([column.float(), torch.ones_like(column).float()], -1),
            "task": torch.zeros_like(column),
        },
        [rows, steps + 1],
    )
    reward = torch.zeros(rows, steps, chunk)
    reward[..., -1] = (column[:, 1:] == COLUMNS - 1).float()
    no = torch.zeros(rows, steps, dtype=torch.bool)
    following = {"observation": observation[:, 1:], "reward": reward, "terminated": no, "success": no.clone()}
    first = no.clone()
    first[:, 0] = True
    action = push[:, :, None, None].float().expand(-1, -1, chunk, 1).contiguous()
    windows = {"observation": observation[:, :-1], "next": following, "action": action, "is_first": first, "mask": ~no}
    return TensorDict(windows, [rows, steps])


def drawn(column: torch.Tensor, top: int) -> torch.Tensor:
    """[...] -> uint8 [..., 3, 32, 32]: a bright square of 8 x 8 pixels."""
    is_column = torch.arange(SIDE) // 8 == column[..., None]
    is_row = (torch.arange(SIDE) >= top) & (torch.arange(SIDE) < top + 8)
    square = (is_column[..., None, :] & is_row[:, None])[..., None, :, :]
    return (square.expand(*column.shape, 3, SIDE, SIDE) * 200 + 30).to(torch.uint8)


SIZES = {"channels": 16, "width": 32, "layers": 1, "heads": 2, "members": 2, "memory_channels": 4}


def make(seed: int = 0, spec=SPEC, **settings):
    torch.manual_seed(seed)
    settings = SIZES | {"tokenizer_steps": 0, "camera_dropout": 0.0} | settings
    return make_world_model(TokenWorldModelConfig(**settings), spec, chunk=2).eval()
