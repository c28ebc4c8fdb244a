"""The tile encoder: exact round trip, ring closure, distortion of the EXL3 specification 6.5."""

import pytest
import torch

from twinspark.errors import KernelUnsupported
from twinspark.kernels.exl3 import (
    Codebook,
    codebook_table,
    decode_matrix,
    decode_tiles,
    pack_states,
)
from twinspark.kernels.exl3.decode import stream_order, unpack_states
from twinspark.quantize.allocate import GAUSSIAN_DISTORTION
from twinspark.quantize.search import GAUSSIAN_RMS
from twinspark.quantize.trellis import (
    TileEncoder,
    rows_from_tiles,
    states_to_values,
    tiles_from_rows,
)


def gaussian(tiles, bits, codebook=Codebook.MUL1, seed=0):
    x = torch.randn(tiles, 256, generator=torch.Generator().manual_seed(seed))
    return x * GAUSSIAN_RMS[codebook][bits - 1]


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize("bits", range(1, 9))
def test_states_survive_packing_and_decode_to_their_values(bits, codebook):
    targets = gaussian(2, bits, codebook, seed=bits)
    states = TileEncoder(bits=bits, codebook=codebook)(targets)
    words = pack_states(states, 2 * bits)
    assert words.shape == (2, 16 * bits) and words.dtype == torch.int16
    assert torch.equal(unpack_states(words), states)
    values = states_to_values(states, codebook)
    assert torch.equal(values, codebook_table(codebook).float()[states.long()])
    row_major = decode_tiles(words, codebook).float().view(2, 256)
    assert torch.equal(row_major[:, torch.from_numpy(stream_order())], values)


@pytest.mark.parametrize("bits", [1, 3, 5, 8])
def test_states_form_a_ring(bits):
    states = TileEncoder(bits=bits, codebook=Codebook.MUL1)(gaussian(3, bits))
    kept = (1 << (16 - bits)) - 1
    before = states.roll(1, 1)
    assert torch.equal(states >> bits, before & kept)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_distortion_of_a_gaussian_source(bits):
    """Within 2 % of the table over 2,048 tiles, plus what 64 tiles scatter."""
    targets = gaussian(64, bits, seed=10 + bits)
    found = states_to_values(TileEncoder(bits=bits, codebook=Codebook.MUL1)(targets), Codebook.MUL1)
    distortion = float((found - targets).square().mean() / targets.square().mean())
    # standard error of the table scaled from 2,048 to 64 tiles: 1.2, 1.3 and 1.8 %
    scatter = {2: 1.4e-4, 3: 4.0e-5, 4: 1.4e-5}[bits] * 32**0.5
    assert abs(distortion - GAUSSIAN_DISTORTION[bits - 1]) < (
        0.02 * GAUSSIAN_DISTORTION[bits - 1] + scatter
    )


def test_search_is_optimal_for_the_edge_it_holds():
    """Eight bits leave 256 edges: a plain dynamic program over them, state by state, agrees."""
    targets = gaussian(1, 8, seed=3)
    states = TileEncoder(bits=8, codebook=Codebook.MUL1)(targets)[0]
    table = codebook_table(Codebook.MUL1).double()
    edge = int(states[-1]) & 255
    cost = torch.full((256,), torch.inf, dtype=torch.float64)
    cost[edge] = 0
    for target in targets[0].double():
        step = (table - target).square().view(256, 256)  # [incoming edge, outgoing edge]
        cost = (cost[:, None] + step).amin(0)
    reached = (table[states.long()] - targets[0].double()).square().sum()
    assert reached == pytest.approx(float(cost[edge]), rel=1e-6)


def test_a_representable_tile_is_found_exactly():
    """A ring of random states is its own best approximation."""
    bits, generator = 4, torch.Generator().manual_seed(8)
    words = torch.randint(-32768, 32768, (2, 16 * bits), generator=generator).to(torch.int16)
    states = unpack_states(words)
    values = states_to_values(states, Codebook.MCG)
    found = TileEncoder(bits=bits, codebook=Codebook.MCG)(values)
    assert torch.equal(states_to_values(found, Codebook.MCG), values)


def test_tiles_and_rows_are_inverse_and_in_the_decoder_s_order():
    rows = torch.randn(3, 16, 64)
    tiles = tiles_from_rows(rows)
    assert tiles.shape == (12, 256)
    assert torch.equal(rows_from_tiles(tiles, 3), rows)
    bits = 2
    states = TileEncoder(bits=bits, codebook=Codebook.MUL1)(tiles[:4])
    trellis = pack_states(states, 2 * bits).view(1, 4, 16 * bits)
    expected = rows_from_tiles(states_to_values(states, Codebook.MUL1), 1)[0]
    assert torch.equal(decode_matrix(trellis, Codebook.MUL1).float(), expected)


def test_batches_do_not_change_a_tile():
    targets = gaussian(11, 6)
    encoder = TileEncoder(bits=6, codebook=Codebook.MUL1)
    together = encoder(targets)
    assert torch.equal(together[9:], encoder(targets[9:]))


def test_refusals():
    with pytest.raises(ValueError, match="1 to 8"):
        TileEncoder(bits=9, codebook=Codebook.MUL1)
    with pytest.raises(ValueError, match="256"):
        TileEncoder(bits=4, codebook=Codebook.MUL1)(torch.zeros(3, 255))
    with pytest.raises(KernelUnsupported, match="CUDA"):
        TileEncoder(bits=4, codebook=Codebook.MUL1, backend="triton")
    assert TileEncoder(bits=4, codebook=Codebook.MUL1)(torch.zeros(0, 256)).shape == (0, 256)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", range(1, 9))
def test_triton_body_equals_torch(bits):
    targets = gaussian(40, bits).cuda()
    plain = TileEncoder(bits=bits, codebook=Codebook.MUL1, device="cuda", backend="torch")(targets)
    fast = TileEncoder(bits=bits, codebook=Codebook.MUL1, device="cuda", backend="triton")(targets)
    # a fused multiply-add may break a tie otherwise: the path costs must agree, not the states
    losses = [(states_to_values(s, Codebook.MUL1) - targets).square().sum(1) for s in (plain, fast)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)
