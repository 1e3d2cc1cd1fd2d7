"""Point clouds -> features, whatever the order of the points (a PointNet)."""

import torch
from torch import nn

from sparring.errors import UserError

# metres -> about 1 at the edge of a table, as in observation/state
_SCALE = 4.0


class PointEncoder(nn.Module):
    """Each point through the same small MLP, the maximum over points, and one more layer: `[B, features]`.

    In the gripper's frame a point is told by where it is from the hand (from each hand where there are two), so what
    is learned at one place of the table holds at all others. Only the position is taken off: the state that an env
    shows does not tell how the hand is turned about its fingers' axis.
    """

    def __init__(self, config, spec):
        super().__init__()
        colours = spec.observation["points"][0][1] - 3
        self.hands = 0
        if config.point_frame == "gripper":
            if not spec.hand_entries:
                raise UserError(
                    "policy.point_frame=gripper, but this env does not say where in observation/state its hands are "
                    "(EnvSpec.hand_entries); set policy.point_frame=world"
                )
            self.hands = len(spec.hand_entries) // 3
            self.register_buffer("hand_entries", torch.tensor(spec.hand_entries), persistent=False)
            self.hand_scale = spec.hand_scale
        layers: list[nn.Module] = []
        inputs = 3 * max(self.hands, 1) + colours
        for width in config.point_channels:
            layers += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU()]
            inputs = width
        self.each_point = nn.Sequential(*layers)
        self.output = nn.Sequential(nn.Linear(inputs, config.point_features), nn.LayerNorm(config.point_features))

    def forward(self, points: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        # [B, P, 6], [B, S] -> [B, features]; the state is asked for in the gripper's frame only, as the env gave it
        places, colours = points[..., :3], points[..., 3:]
        if self.hands:
            # [B, 1, 3 R]
            hands = (state[:, self.hand_entries] / self.hand_scale)[:, None]
            places = places.repeat(1, 1, self.hands) - hands
        return self.output(self.each_point(torch.cat([_SCALE * places, colours], -1)).amax(1))
