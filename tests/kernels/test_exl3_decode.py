"""EXL3 decoding against the golden data, bit for bit, and packing as its inverse."""

import hashlib

import numpy as np
import pytest
import torch
from tests.kernels.exl3_data import GOLDEN, golden_matrix, golden_words

from twinspark.kernels.exl3 import (
    Codebook,
    codebook_table,
    decode_matrix,
    decode_tiles,
    pack_states,
    unpack_states,
)
from twinspark.kernels.exl3.decode import stream_order


def fp16_bits(text: str) -> np.ndarray:
    return np.array([int(text[i : i + 4], 16) for i in range(0, len(text), 4)], np.uint16)


def tile_id(entry: dict[str, object]) -> str:
    return f"{entry['codebook']}-{entry['bits']}"


@pytest.mark.parametrize("codebook", list(Codebook))
def test_codebook_table(codebook: Codebook) -> None:
    golden = GOLDEN["codebooks"][codebook.value]
    table = codebook_table(codebook)
    assert table.dtype == torch.float16 and table.shape == (65536,)
    digest = hashlib.sha256(table.numpy().tobytes()).hexdigest()
    assert digest == golden["sha256_of_65536_fp16_little_endian"]
    for state, bits in golden["probe"].items():
        assert int(table.numpy().view(np.uint16)[int(state, 16)]) == int(bits, 16)
    wide = table.double()
    assert wide.min() == golden["min"] and wide.max() == golden["max"]
    assert len(torch.unique(wide)) == golden["distinct"]


def test_stream_order() -> None:
    order = stream_order()
    assert order[:32].tolist() == GOLDEN["perm"]["rowmajor_index_of_stream_position_first_32"]
    digest = hashlib.sha256(order.astype(np.uint8).tobytes()).hexdigest()
    assert digest == GOLDEN["perm"]["sha256_of_256_bytes"]


@pytest.mark.parametrize("entry", GOLDEN["tiles"], ids=tile_id)
def test_golden_tile(entry: dict[str, object]) -> None:
    words = golden_words(16 * int(str(entry["bits"])), int(str(entry["seed"])))
    assert hashlib.sha256(words.tobytes()).hexdigest() == entry["sha256_of_words_le"]
    tile = torch.from_numpy(words.view(np.int16))
    states = unpack_states(tile)
    assert states[:8].tolist() == entry["states_first_8"]
    assert states[-2:].tolist() == entry["states_last_2"]
    values = decode_tiles(tile, Codebook(str(entry["codebook"])))
    assert np.array_equal(
        values.numpy().view(np.uint16).ravel(), fp16_bits(str(entry["values_row_major"]))
    )


@pytest.mark.parametrize("entry", GOLDEN["half_bit_tiles"], ids=tile_id)
def test_golden_half_bit_tile(entry: dict[str, object]) -> None:
    words = fp16_bits(str(entry["words"]))
    values = decode_tiles(torch.from_numpy(words.view(np.int16)), Codebook.MUL1)
    assert np.array_equal(
        values.numpy().view(np.uint16).ravel(), fp16_bits(str(entry["values_row_major"]))
    )


@pytest.mark.parametrize(
    "entry",
    GOLDEN["matrices"],
    ids=lambda e: f"{e['codebook']}-{e['bits']}-{e['in_features']}x{e['out_features']}",
)
def test_golden_matrix_decodes(entry: dict[str, object]) -> None:
    matrix, _ = golden_matrix(entry)
    inner = decode_matrix(matrix.trellis, matrix.codebook)
    assert inner.shape == (matrix.in_features, matrix.out_features)
    digest = hashlib.sha256(inner.numpy().tobytes()).hexdigest()
    assert digest == entry["sha256_inner_fp16_le"]


@pytest.mark.parametrize("bits2", range(2, 17))
def test_pack_inverts_unpack(bits2: int) -> None:
    rng = np.random.default_rng(bits2)
    words = torch.from_numpy(rng.integers(-32768, 32768, (3, 5, 8 * bits2), dtype=np.int16))
    states = unpack_states(words)
    assert states.min() >= 0 and states.max() <= 65535
    assert torch.equal(pack_states(states, bits2), words)


def test_decode_matrix_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.from_numpy(
        np.random.default_rng(0).integers(-32768, 32768, (24, 8, 48), dtype=np.int16)
    )
    whole = decode_matrix(words, Codebook.MCG)
    monkeypatch.setattr("twinspark.kernels.exl3.decode._SLAB_VALUES", 8 * 256 * 5)
    assert torch.equal(decode_matrix(words, Codebook.MCG), whole)


@pytest.mark.parametrize("width", [0, 4, 8, 20, 136])
def test_wrong_width_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match="int16 words"):
        decode_tiles(torch.zeros(2, width, dtype=torch.int16), Codebook.MUL1)


def test_wrong_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="int32"):
        decode_tiles(torch.zeros(2, 16, dtype=torch.int32), Codebook.MUL1)
