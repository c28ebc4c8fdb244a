"""The global scale of a matrix: how large a unit-RMS source should enter the codebook.

Owns the table of optima for white Gaussian sources and the search around them on a sample of
tiles (EXL3 specification 6.4). Letters: M matrices, K inputs, N outputs, S sampled tiles.
Read next: matrix.py.
"""

import numpy as np
import torch
from torch import Tensor

from twinspark.kernels.exl3 import Codebook
from twinspark.quantize.allocate import GAUSSIAN_DISTORTION
from twinspark.quantize.trellis import TileEncoder, states_to_values, tiles_from_rows

_STEPS = (0.90, 0.95, 1.0, 1.05, 1.10)

GAUSSIAN_RMS = {
    Codebook.MUL1: (1.094, 0.995, 0.933, 0.920, 0.871, 0.846, 0.821, 0.796),
    Codebook.MCG: (1.318, 1.219, 1.169, 1.107, 1.070, 1.032, 0.995, 0.958),
    Codebook.THREEINST: (1.318, 1.219, 1.169, 1.107, 1.070, 1.032, 0.995, 0.958),
}
"""Best RMS of a Gaussian source at 1 to 8 bits (6.5: 1.24371 g)."""


def search_scale(
    weight_MKN: Tensor,
    noise_MK: Tensor | None,
    *,
    encoder: TileEncoder,
    bits: int,
    codebook: Codebook,
    sample_tiles: int,
    seed: int,
) -> Tensor:
    """The factor that unit-RMS matrices are multiplied by before rounding.

    Candidates near the Gaussian optimum are tried on sampled tiles, to which Gaussian noise of
    the power that feedback will add is added; a parabola through the errors gives the result.

    Args:
        weight_MKN: [M, K, N] fp32, rotated and scaled to unit RMS.
        noise_MK: [M, K] power of the feedback into each row, as a share of the rounding noise;
            None without feedback.
        encoder: of the same width and codebook.
        bits: bits a weight.
        codebook: the codebook.
        sample_tiles: tiles a matrix; 0 takes the Gaussian optimum.
        seed: of the sample and the noise.

    Returns:
        [M] fp64.
    """
    count = weight_MKN.shape[0]
    device = weight_MKN.device
    prior = GAUSSIAN_RMS[codebook][bits - 1]
    added = torch.zeros(count, dtype=torch.float64, device=device)
    if noise_MK is not None:
        added = GAUSSIAN_DISTORTION[bits - 1] * noise_MK.double().mean(1)
    center = prior / (1 + added).sqrt()
    if sample_tiles <= 0:
        return center
    tiles_MSX = _sample(weight_MKN, noise_MK, GAUSSIAN_DISTORTION[bits - 1], sample_tiles, seed)
    losses = []
    for step in _STEPS:
        scale = (center * step).float()[:, None, None]
        target = tiles_MSX * scale
        found = states_to_values(encoder(target.view(-1, target.shape[-1])), codebook)
        error = (found.view(target.shape) - target) / scale
        losses.append(error.double().square().mean((1, 2)))
    return center * _parabola(torch.stack(losses, 1))


def _sample(
    weight_MKN: Tensor, noise_MK: Tensor | None, distortion: float, number: int, seed: int
) -> Tensor:
    """Tiles along a wrapped diagonal, with feedback noise: [M, S, 256] in stream order."""
    count, inputs, outputs = weight_MKN.shape
    tile_rows, tile_columns = inputs // 16, outputs // 16
    number = min(number, tile_rows * tile_columns)
    draws = np.random.default_rng(seed)
    offsets = draws.permutation(max(tile_rows, tile_columns))[:number]
    places = np.resize(offsets, number)
    shift = np.arange(number) // len(offsets)
    rows = torch.from_numpy(places % tile_rows).to(weight_MKN.device)
    columns = torch.from_numpy((places + shift) % tile_columns).to(weight_MKN.device)
    grid = weight_MKN.view(count, tile_rows, 16, tile_columns, 16).permute(0, 1, 3, 2, 4)
    tiles = grid[:, rows, columns]
    if noise_MK is not None:
        noise = torch.from_numpy(draws.standard_normal(tiles.shape[1:]).astype(np.float32))
        power = noise_MK.float().view(count, tile_rows, 16)[:, rows] * distortion
        tiles = tiles + noise.to(tiles.device) * power.sqrt()[..., None]
    flat = tiles.reshape(-1, 16, 16)
    return tiles_from_rows(flat).view(count, number, 256)


def _parabola(losses_MP: Tensor) -> Tensor:
    """The step with the least loss, by a least-squares parabola over the steps tried: [M]."""
    steps = torch.tensor(_STEPS, dtype=torch.float64, device=losses_MP.device)
    basis = torch.stack([torch.ones_like(steps), steps, steps.square()], 1)
    fit = torch.linalg.lstsq(basis.cpu(), losses_MP.t().cpu()).solution.to(losses_MP.device)
    bend = fit[2].clamp(min=1e-12)
    inside = (-fit[1] / (2 * bend)).clamp(_STEPS[0], _STEPS[-1])
    best = steps[losses_MP.argmin(1)]
    return torch.where(fit[2] > 1e-12, inside, best)
