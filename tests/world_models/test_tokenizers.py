"""Quantizers by hand; the inputs, outputs and training of tokenizers."""

import math

import pytest
import torch
from doubles_moving import drawn

from sparring.world_models.tokenizers import (
    FSQ,
    VQ,
    ContextTokenizer,
    FrameTokenizer,
    _cut,
    _paste,
    _split_cells,
    merge_cells,
)


def test_fsq_by_hand():
    fsq = FSQ((8, 5))
    # squashed, -5/7 is exactly the second of eight levels and 0.5 the fourth of five; large values give the ends
    z = torch.tensor([[math.atanh(-5 / 7), math.atanh(0.5)], [9.0, -9.0]])
    codes, digits, loss = fsq(z)
    assert digits.tolist() == [[1, 3], [7, 0]]
    torch.testing.assert_close(codes, torch.tensor([[-5 / 7, 0.5], [1.0, -1.0]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(fsq.codes(digits), codes, atol=1e-6, rtol=0)
    assert float(loss) == 0
    assert fsq.valid.tolist() == [[True] * 8, [True] * 5 + [False] * 3]


def test_fsq_passes_the_gradient_of_the_squashing():
    z = torch.tensor([0.3, -1.2], requires_grad=True)
    FSQ((8, 8))(z)[0].sum().backward()
    torch.testing.assert_close(z.grad, 1 - torch.tanh(z.detach()) ** 2)


def test_fsq_mean_code():
    half = torch.zeros(1, 2, 8)
    half[0, 0, 0] = half[0, 0, 7] = 0.5
    half[0, 1, 2] = 1.0
    torch.testing.assert_close(FSQ((8, 5)).expected(half), torch.tensor([[0.0, 0.0]]))


def test_vq_by_hand():
    vq = VQ(3, size=2, commitment=0.25)
    vq.codebook.data = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [3.0, 3.0]])
    # normalised, (4, 0) is (1, -1) and (0, 1) is (-1, 1)
    z = torch.tensor([[4.0, 0.0], [0.0, 1.0]], requires_grad=True)
    codes, digits, loss = vq(z)
    assert digits.tolist() == [[0], [1]]
    torch.testing.assert_close(codes.detach(), vq.codes(digits).detach(), atol=1e-4, rtol=0)
    assert loss.item() < 1e-4
    vq.codebook.data[0] = torch.tensor([1.0, -0.5])
    # one of four values differs by 0.5: 1/16 for the codebook and a quarter of that for the encoder
    assert vq(z)[2].item() == pytest.approx(1.25 * 0.25 / 4, abs=1e-4)
    share = torch.tensor([[[0.25, 0.75, 0.0]]])
    torch.testing.assert_close(vq.expected(share).detach(), torch.tensor([[-0.5, 0.625]]))


def test_cutting_and_pasting():
    images = torch.arange(2 * 3 * 16 * 32).reshape(2, 3, 16, 32).float()
    cells = _cut(images)
    assert cells.shape == (2, 4, 8, 48)
    # the second cell of the first row holds columns 4 to 7 of rows 0 to 3
    torch.testing.assert_close(cells[1, 0, 1].reshape(3, 4, 4), images[1, :, :4, 4:8])
    assert torch.equal(_paste(cells), images)
    tokens = merge_cells(cells)
    assert tokens.shape == (2, 2, 16 * 48)
    # the second token holds columns 16 to 31
    assert torch.equal(tokens[0, 1].reshape(4, 4, 48), cells[0, :, 4:])
    assert torch.equal(_split_cells(tokens, 4, 8), cells)


@pytest.mark.parametrize("size", [(16, 16), (64, 64), (32, 80)])
def test_any_size_of_whole_patches(size):
    tokenizer = ContextTokenizer(FSQ((8, 8, 8)), 16)
    frame = torch.rand(2, 3, *size)
    features = tokenizer.stem(frame)
    digits = tokenizer.encode(features, features)
    assert digits.shape == (2, size[0] * size[1] // 256, 3)
    assert tokenizer.decode(frame, features, tokenizer.quantizer.codes(digits)).shape == frame.shape


def copying_tokenizer() -> ContextTokenizer:
    """The 6 x 16 outputs of a cell: 48 colours, 16 gates of its pixels, 32 offsets of their sources."""
    tokenizer = ContextTokenizer(FSQ((8, 8, 8)), 16)
    tokenizer.pixels[-1].bias.data[48:64] = -100
    tokenizer.pixels[-1].weight.data[64:] = 0
    tokenizer.pixels[-1].bias.data[64:] = 0
    return tokenizer


def test_a_closed_gate_copies():
    tokenizer = copying_tokenizer()
    frame = torch.rand(2, 3, 16, 16)
    features = tokenizer.stem(frame)
    torch.testing.assert_close(tokenizer.decode(frame, features, torch.rand(2, 1, 3)), frame)


def test_pixels_come_from_the_predicted_offset():
    tokenizer = copying_tokenizer()
    # atanh(2 / 16): two pixels to the right, and half a pixel above
    tokenizer.pixels[-1].bias.data[64:80] = math.atanh(2 / 16)
    tokenizer.pixels[-1].bias.data[80:] = math.atanh(-0.5 / 16)
    frame = torch.rand(2, 3, 16, 16)
    decoded = tokenizer.decode(frame, tokenizer.stem(frame), torch.rand(2, 1, 3))
    torch.testing.assert_close(decoded[:, :, 1:, :-2], (frame[:, :, :-1, 2:] + frame[:, :, 1:, 2:]) / 2)
    # pixels outside the image repeat its edge
    torch.testing.assert_close(decoded[:, :, 0, :-2], frame[:, :, 0, 2:])
    torch.testing.assert_close(decoded[:, :, 0, -2:], frame[:, :, 0, -1:].expand(-1, -1, 2))


def test_the_context_tokenizer_reads_both_frames_and_the_frame_tokenizer_the_next_only():
    torch.manual_seed(0)
    one, other = (random_features(seed) for seed in (1, 2))
    context, alone = ContextTokenizer(FSQ((8,) * 6), 16), FrameTokenizer(FSQ((8,) * 6), 16)
    assert not torch.equal(context.encode(one, other), context.encode(other, other))
    assert torch.equal(alone.encode(one, other), alone.encode(other, other))
    assert not torch.equal(alone.encode(one, other), alone.encode(other, one))
    frame, codes = torch.rand(2, 8, 3, 16, 16), torch.rand(8, 1, 6)
    assert torch.equal(alone.decode(frame[0], one, codes), alone.decode(frame[1], other, codes))


def random_features(seed: int) -> torch.Tensor:
    return torch.randn(8, 4, 4, 16, generator=torch.Generator().manual_seed(seed)) * 3


def test_changed_pixels_count_five_times():
    tokenizer = copying_tokenizer()
    frame = torch.full((1, 3, 16, 16), 0.5)
    following = frame.clone()
    following[:, :, 0, 0] = 0.6  # changed
    following[:, :, 0, 1] = 0.5 + 4 / 255  # below the threshold of a change
    features = tokenizer.stem(frame)
    loss, quantizer_loss = tokenizer.loss(frame, features, following, tokenizer.stem(following))
    small = 4 / 255
    assert loss.item() == pytest.approx((5 * (0.1 + 8 * 0.01) + small + 8 * small**2) / 256, rel=1e-4)
    assert float(quantizer_loss) == 0


@pytest.mark.parametrize(("kind", "quantizer"), [(ContextTokenizer, FSQ((8, 8, 8))), (FrameTokenizer, VQ(64))])
def test_a_tokenizer_learns_to_reconstruct_the_next_frame(kind, quantizer):
    """A square jumps: the tokens must encode where from and where to."""
    torch.manual_seed(0)
    tokenizer = kind(quantizer, 24)
    optimizer = torch.optim.AdamW(tokenizer.parameters(), 4e-3)
    place = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    frame, following = (drawn(place[:, i], top=0).float() / 255 for i in (0, 1))
    copied = float((frame - following).square().mean())
    for _ in range(150):
        features = tokenizer.stem(frame), tokenizer.stem(following)
        loss, quantizer_loss = tokenizer.loss(frame, features[0], following, features[1])
        optimizer.zero_grad()
        (loss + quantizer_loss).backward()
        optimizer.step()
    with torch.no_grad():
        before, after = tokenizer.stem(frame), tokenizer.stem(following)
        codes = tokenizer.quantizer.codes(tokenizer.encode(before, after))
        left = float((tokenizer.decode(frame, before, codes) - following).square().mean())
    assert left < 0.2 * copied
