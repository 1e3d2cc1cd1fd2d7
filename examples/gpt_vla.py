"""Example of your own vision-language-action model: a tiny GPT over image patches, joints and instruction bytes.

    python examples/gpt_vla.py outputs/gpt_vla
    sparring train finetune --config configs/vla_example.json

The first command writes a checkpoint in Hugging Face's layout (config.json, model.safetensors) with random weights,
which stands for a pretrained one; the second fine-tunes it. docs/vla.md explains what each method is for.

Letters: B decisions, L tokens, W width.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

# name -> channels of its convolutions
VISION_ENCODERS = {"conv_tiny": (16, 32), "conv_small": (32, 64, 64)}
# name -> width, layers, heads
LANGUAGE_MODELS = {"byte_gpt_tiny": (32, 2, 2), "byte_gpt_small": (128, 4, 4)}
LONGEST = 128


class GPTVLAModel(nn.Module):
    """Image patches, joints and instruction bytes are tokens. A last token attends to all of them, and its output feeds
    the action head and the value head."""

    def __init__(
        self,
        action_dim: int,
        proprio_dim: int,
        vision_encoder: str = "conv_tiny",
        language_model: str = "byte_gpt_tiny",
        freeze_vision_encoder: bool = False,
        init_std: float = 0.5,
    ):
        super().__init__()
        self.action_dim = action_dim
        width, layers, heads = LANGUAGE_MODELS[language_model]
        self.vision = _convolutions(VISION_ENCODERS[vision_encoder], width)
        self.proprio = nn.Linear(proprio_dim, width)
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(0.02 * torch.randn(LONGEST, width))
        self.act_token = nn.Parameter(0.02 * torch.randn(width))
        self.gpt = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.action_head = nn.Linear(width, action_dim)
        # small initial weights: the mean action is near zero for every observation
        nn.init.normal_(self.action_head.weight, std=0.01)
        self.log_std = nn.Parameter(torch.full((action_dim,), init_std).log())
        self.value_head = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 1))
        if freeze_vision_encoder:
            self.vision.requires_grad_(False)

    def forward(self, observations) -> torch.Tensor:
        """The mean action [B, action_dim]."""
        return self.action_head(self._think(observations)).float()

    def sample(self, observations, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions [B, action_dim] from uniform numbers of the same shape, and their log-probs [B]."""
        distribution = self._distribution(observations)
        actions = distribution.mean + distribution.stddev * torch.special.ndtri(noise)
        return actions, distribution.log_prob(actions).sum(-1)

    def get_value(self, observations) -> torch.Tensor:
        """The value [B, 1]. Its gradient does not reach the layers that actions depend on."""
        return self.value_head(self._think(observations).detach()).float()

    def evaluate_actions(self, observations, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob [B] and entropy [B]."""
        distribution = self._distribution(observations)
        return distribution.log_prob(actions).sum(-1), distribution.entropy().sum(-1)

    def _distribution(self, observations) -> torch.distributions.Normal:
        return torch.distributions.Normal(self(observations), self.log_std.exp(), validate_args=False)

    def _think(self, observations) -> torch.Tensor:
        # [B, L, W] -> [B, W]
        patches = self.vision(observations["rgb"]).flatten(2).mT
        joints = self.proprio(observations["proprio"])[:, None]
        words = self.bytes(observations["language"]) * observations["language_mask"][..., None]
        last = self.act_token.expand(len(patches), 1, -1)
        tokens = torch.cat([patches, joints, words, last], 1)
        tokens = tokens + self.places[: tokens.shape[1]]
        return self.norm(self.gpt(tokens)[:, -1])


class Block(nn.Module):
    """Causal attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # [B, L, 3W] -> three [B, heads, L, W / heads]
        q, k, v = self.qkv(self.before_attention(tokens)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        tokens = tokens + self.out(mixed.transpose(1, 2).flatten(2))
        return tokens + self.mlp(self.before_mlp(tokens))


def _convolutions(channels: tuple[int, ...], width: int) -> nn.Sequential:
    """[B, 3, H, W] -> [B, width, 4, 4]."""
    layers, inputs = [], 3
    for outputs in channels:
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Conv2d(inputs, width, 1))


def write_checkpoint(folder: Path, seed: int = 0, **settings) -> None:
    """Write config.json (the constructor arguments) and model.safetensors (the weights)."""
    torch.manual_seed(seed)
    model = GPTVLAModel(**settings)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_vla", **settings}, indent=2))
    save_file(model.state_dict(), folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint of GPTVLAModel with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--action-dim", type=int, default=7)
    parser.add_argument("--proprio-dim", type=int, default=36)
    parser.add_argument("--vision-encoder", choices=VISION_ENCODERS, default="conv_tiny")
    parser.add_argument("--language-model", choices=LANGUAGE_MODELS, default="byte_gpt_tiny")
    arguments = vars(parser.parse_args())
    folder = arguments.pop("folder")
    write_checkpoint(folder, **arguments)
    print(f"{folder}: config.json and model.safetensors")


if __name__ == "__main__":
    main()
