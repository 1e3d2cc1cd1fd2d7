"""Tokenizers: one discrete token for every 16 x 16 pixels of a frame, shared by all cameras. A context tokenizer
encodes the change of a patch since the previous frame; a frame tokenizer encodes its appearance. A token is K digits:
an FSQ code or one VQ index, with straight-through gradients. Letters: F frames, P tokens of a frame, h x w cells of
4 x 4 pixels, c channels (always last)."""

import torch
from torch import nn

CELL, PATCH = 4, 16  # side in pixels of a cell of a feature map, and of the patch of a token
SIDE = PATCH // CELL  # side of a patch in cells
# a pixel counts as changed above 8/255; extra weights of changed pixels and squared errors: else copying is nearly
# optimal
_CHANGED, _CHANGED_WEIGHT, _SQUARES = 8, 4.0, 8.0
_FARTHEST = 16.0  # the largest motion, in pixels per decision


class FSQ(nn.Module):
    """Finite scalar quantisation: each number is squashed to (-1, 1) and rounded to one of its levels."""

    def __init__(self, levels: tuple[int, ...]):
        super().__init__()
        self.digits, self.values, self.size = len(levels), max(levels), len(levels)
        self.most = nn.Buffer(torch.tensor(levels, dtype=torch.float32) - 1, persistent=False)
        # [K, L]: the valid values of a digit, and the number that each represents
        value = torch.arange(self.values)
        self.valid = nn.Buffer(value <= self.most[:, None], persistent=False)
        self.numbers = nn.Buffer(2 * value / self.most[:, None] - 1, persistent=False)

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[.., K] -> codes [.., K], digits [.., K] and a quantiser loss (zero)."""
        squashed = torch.tanh(z)
        digits = ((squashed + 1) / 2 * self.most).round()
        codes = squashed + (2 * digits / self.most - 1 - squashed).detach()
        return codes, digits.long(), z.new_zeros(())

    def codes(self, digits: torch.Tensor) -> torch.Tensor:
        return 2 * digits / self.most - 1

    def expected(self, probabilities: torch.Tensor) -> torch.Tensor:
        """[.., K, L] -> the mean code [.., K]."""
        return (probabilities * self.numbers).sum(-1)


class VQ(nn.Module):
    def __init__(self, codebook_size: int, size: int = 16, commitment: float = 0.25):
        super().__init__()
        self.digits, self.values, self.size, self.commitment = 1, codebook_size, size, commitment
        # inputs are normalised to the scale of the codebook, so that nearly all its vectors are used
        self.norm = nn.LayerNorm(size, elementwise_affine=False)
        self.codebook = nn.Parameter(torch.randn(codebook_size, size))
        self.valid = nn.Buffer(torch.ones(1, codebook_size, dtype=torch.bool), persistent=False)

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[.., E] -> codes [.., E], digits [.., 1], and the codebook and commitment loss."""
        z = self.norm(z)
        distance = self.codebook.square().sum(-1) - 2 * z @ self.codebook.T
        digits = distance.argmin(-1, keepdim=True)
        nearest = self.codes(digits)
        loss = (nearest - z.detach()).square().mean() + self.commitment * (nearest.detach() - z).square().mean()
        return z + (nearest - z).detach(), digits, loss

    def codes(self, digits: torch.Tensor) -> torch.Tensor:
        return self.codebook[digits[..., 0]]

    def expected(self, probabilities: torch.Tensor) -> torch.Tensor:
        return probabilities[..., 0, :] @ self.codebook  # [.., 1, V] -> [.., E]


class _Tokenizer(nn.Module):
    """Base of both tokenizers. Frames are float in 0..1; `features` are the stem's feature maps of them."""

    frames: int  # number of frames that the encoder gets
    drawn_channels: int = 3  # channels that the decoder draws for each pixel, colours first

    def __init__(self, quantizer: FSQ | VQ, channels: int):
        super().__init__()
        self.quantizer, self.channels = quantizer, channels
        self.stem = _FrameStem(channels)
        self.encoder_in = nn.Linear(self.frames * SIDE**2 * channels, 4 * channels)
        self.encoder_out = nn.Sequential(
            nn.SiLU(), nn.Linear(4 * channels, channels), nn.LayerNorm(channels), nn.Linear(channels, quantizer.size)
        )
        self.decoder_in = nn.Linear(quantizer.size, SIDE**2 * channels)
        self.decoder = nn.Sequential(*(_ConvBlock(channels) for _ in range(3)))
        self.pixels = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.SiLU(), nn.Linear(2 * channels, self.drawn_channels * CELL * CELL)
        )

    def encode(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return self._quantized(before, after)[1]

    def decode(self, frame: torch.Tensor, features: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """The next frame, from the current frame, its features, and the codes [F, P, E] of the tokens."""
        raise NotImplementedError

    def loss(self, frame, features, following, following_features) -> tuple[torch.Tensor, torch.Tensor]:
        """The picture loss and the quantiser loss."""
        codes, _, quantizer_loss = self._quantized(features, following_features)
        return self.picture_loss(self.decode(frame, features, codes), frame, following), quantizer_loss

    @staticmethod
    def picture_loss(drawn: torch.Tensor, frame: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        wrong = drawn.float() - following
        changed = (following - frame).abs().amax(1, keepdim=True) > _CHANGED / 255
        return ((wrong.abs() + _SQUARES * wrong.square()) * (1 + _CHANGED_WEIGHT * changed)).mean()

    def _quantized(self, before: torch.Tensor, after: torch.Tensor):
        seen = torch.cat([merge_cells(features) for features in (before, after)[-self.frames :]], -1)
        return self.quantizer(self.encoder_out(self.encoder_in(seen)).float())

    def _drawn(self, cells: torch.Tensor) -> torch.Tensor:
        """[F, h, w, c] -> [F, drawn_channels, H, W]."""
        return _paste(self.pixels(self.decoder(cells)))


class ContextTokenizer(_Tokenizer):
    """Copies each pixel from a position in the previous frame, and blends a drawn colour in through a gate."""

    frames, drawn_channels = 2, 6

    def decode(self, frame, features, codes):
        cells = features + _split_cells(self.decoder_in(codes), *features.shape[1:3])
        drawn = self._drawn(cells).float()
        moved = _moved_by(frame, _FARTHEST * torch.tanh(drawn[:, 4:]))
        gate = torch.sigmoid(drawn[:, 3:4] - 1.0)
        return moved + gate * (drawn[:, :3] + 0.5 - moved)


class FrameTokenizer(_Tokenizer):
    frames = 1

    def decode(self, frame, features, codes):
        return self._drawn(_split_cells(self.decoder_in(codes), *features.shape[1:3])) + 0.5


class _FrameStem(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        wide = 2 * channels
        self.patches = nn.Sequential(nn.Linear(3 * CELL * CELL, wide), nn.SiLU(), nn.Linear(wide, channels))
        self.block = _ConvBlock(channels)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.block(self.patches(_cut(images) - 0.5))  # [F, 3, H, W] in 0..1 -> [F, h, w, 48] -> [F, h, w, c]


class _ConvBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.around = nn.Conv2d(channels, channels, 3, padding=1)
        self.output = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # [F, h, w, c]; the convolution needs channels first: a permutation of strides, without a copy
        around = self.around(nn.functional.silu(self.norm(x)).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x + self.output(nn.functional.silu(around))


def _cut(images: torch.Tensor) -> torch.Tensor:
    """[F, k, H, W] -> [F, h, w, 16k]: the pixels of each cell become its channels."""
    frames, channels, height, width = images.shape
    cells = images.reshape(frames, channels, height // CELL, CELL, width // CELL, CELL)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(frames, height // CELL, width // CELL, -1)


def _paste(cells: torch.Tensor) -> torch.Tensor:
    """The inverse of `_cut`: [F, h, w, 16k] -> [F, k, H, W]."""
    frames, height, width, size = cells.shape
    cells = cells.reshape(frames, height, width, size // CELL**2, CELL, CELL).permute(0, 3, 1, 4, 2, 5)
    return cells.reshape(frames, -1, height * CELL, width * CELL)


def merge_cells(cells: torch.Tensor) -> torch.Tensor:
    """[F, h, w, c] -> [F, P, 16c]: the 4 x 4 cells of a token become its features."""
    frames, height, width, channels = cells.shape
    blocks = cells.reshape(frames, height // SIDE, SIDE, width // SIDE, SIDE, channels).permute(0, 1, 3, 2, 4, 5)
    return blocks.reshape(frames, -1, SIDE**2 * channels)


def _split_cells(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `merge_cells`: [F, P, 16c] -> [F, h, w, c]."""
    frames, _, size = tokens.shape
    blocks = tokens.reshape(frames, height // SIDE, width // SIDE, SIDE, SIDE, size // SIDE**2)
    return blocks.permute(0, 1, 3, 2, 4, 5).reshape(frames, height, width, -1)


def _moved_by(frame: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
    """[F, 3, H, W]: each pixel is read at the offset `way` [F, 2, H, W] (right, down); borders are repeated."""
    height, width = frame.shape[-2:]
    rows, columns = torch.arange(height, device=frame.device), torch.arange(width, device=frame.device)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    # [F, H, W, 2], where -1 and 1 are the centres of the outermost pixels
    place = torch.stack([(x + way[:, 0]) * 2 / (width - 1) - 1, (y + way[:, 1]) * 2 / (height - 1) - 1], -1)
    # on a CPU, grid_sample writes the gradient of a NaN position out of bounds; the last line restores the NaN
    moved = nn.functional.grid_sample(frame, place.nan_to_num(0.0), padding_mode="border", align_corners=True)
    return moved + way.detach().sum() * 0
