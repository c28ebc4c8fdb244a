"""Tensors from packs (I17): every storage kind, slices equal to parts of the whole."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import tiny
from tests.golden import tiny_weights
from tests.unit.pack.damage import rewrite, shard_of

from twinspark.errors import MissingTensor
from twinspark.kernels.dequant import dequant_engram
from twinspark.kernels.exl3 import Codebook, Exl3Matrix, dense_weight
from twinspark.pack.check import Storage
from twinspark.pack.format import CODEBOOK_MARKERS
from twinspark.pack.layout import LinearSpec, model_layout
from twinspark.pack.reader import open_pack
from twinspark.pack.weights import EngramTable, PackWeights, PlainMatrix, narrowed
from twinspark.pack.writer import TensorData, write_pack


@pytest.fixture(scope="module")
def plain() -> PackWeights:
    return PackWeights(open_pack(tiny.plain_path()))


@pytest.fixture(scope="module")
def exl3() -> PackWeights:
    return PackWeights(open_pack(tiny.exl3_path()))


@pytest.fixture(scope="module")
def hybrid() -> PackWeights:
    return PackWeights(open_pack(tiny.hybrid_path()))


def golden_values(name: str) -> np.ndarray:
    tensors = {t.name: t for t in tiny_weights.tensors(tiny.CONFIG)}
    return np.asarray(tiny_weights.values(tensors[name]))


def dense(matrix: Exl3Matrix | PlainMatrix) -> torch.Tensor:
    """[in, out] float64."""
    if isinstance(matrix, Exl3Matrix):
        return dense_weight(matrix)
    return matrix.weight.double().t()


def test_plain_values_are_the_generators(plain: PackWeights) -> None:
    for t in tiny_weights.tensors(tiny.CONFIG):
        if t.dtype not in ("BF16", "F32") or ".experts." in t.name:
            continue
        expected = torch.from_numpy(tiny_weights.values(t))
        assert torch.equal(plain.plain(t.name).float(), expected), t.name
        release = torch.float32 if t.dtype == "F32" else torch.bfloat16
        assert plain.plain(t.name).dtype == release, t.name
    assert plain.plain("embed.weight", torch.float64).dtype == torch.float64


def test_every_matrix_loads_with_its_shape(
    plain: PackWeights, exl3: PackWeights, hybrid: PackWeights
) -> None:
    for spec in model_layout(plain.pack.config):
        if not isinstance(spec, LinearSpec):
            continue
        for weights in (plain, exl3, hybrid):
            prefixes = [spec.prefix]
            if weights.pack.linear_kind(spec.prefix) is Storage.EXL3_SLICES:
                prefixes = [f"{spec.prefix}.slice.{g}" for g in range(spec.groups)]
            for prefix in prefixes:
                matrix = weights.linear(prefix)
                outputs = spec.outputs // len(prefixes)
                if isinstance(matrix, Exl3Matrix):
                    assert (matrix.in_features, matrix.out_features) == (spec.inputs, outputs)
                else:
                    assert matrix.weight.dtype == torch.bfloat16
                    assert matrix.weight.shape == (outputs, spec.inputs)
                    assert bool(matrix.weight.isfinite().all())


# one of each storage: EXL3, plain, FP8, MXFP4
@pytest.mark.parametrize(
    ("pack", "prefix"),
    [
        ("exl3", "layers.3.attn.wo_b"),
        ("exl3", "layers.2.ffn.experts.7.w2"),
        ("plain", "layers.2.ffn.experts.7.w2"),
        ("hybrid", "layers.2.attn.wo_b"),
        ("hybrid", "layers.2.ffn.experts.7.w2"),
        ("hybrid", "mtp.1.ffn.experts.3.w2"),
    ],
)
def test_slices_are_parts_of_the_whole(
    pack: str, prefix: str, request: pytest.FixtureRequest
) -> None:
    weights: PackWeights = request.getfixturevalue(pack)
    whole = weights.linear(prefix)
    inputs, outputs = dense(whole).shape
    for rows, cols in [
        (slice(inputs // 2, inputs), None),
        (None, slice(0, 128)),
        (slice(0, 128), slice(outputs - 128, outputs)),
    ]:
        part = weights.linear(prefix, rows=rows, cols=cols)
        r, c = rows or slice(None), cols or slice(None)
        if isinstance(whole, Exl3Matrix) and isinstance(part, Exl3Matrix):
            # rotations mix inside 128-blocks only, so a part's matrix is the whole's part
            assert part.codebook is whole.codebook and part.bits == whole.bits
            assert torch.equal(part.suh, whole.suh[r]) and torch.equal(part.svh, whole.svh[c])
        assert torch.equal(dense(part), dense(whole)[r, c])


def test_output_groups_in_every_storage(
    plain: PackWeights, exl3: PackWeights, hybrid: PackWeights
) -> None:
    prefix = "layers.6.attn.wo_a"
    for weights in (plain, exl3, hybrid):
        by_name = weights.linear(prefix + ".slice.1")
        by_columns = weights.linear(prefix, cols=slice(128, 256))
        assert torch.equal(dense(by_name), dense(by_columns))
        assert dense(by_name).shape == (256, 128)
    with pytest.raises(ValueError, match="stored in slices of 128"):
        exl3.linear(prefix)


def test_bad_slices_are_refused(exl3: PackWeights, hybrid: PackWeights) -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        exl3.linear("head", cols=slice(0, 64))
    with pytest.raises(ValueError, match="no part of 512"):
        exl3.linear("head", cols=slice(256, 640))
    with pytest.raises(ValueError, match="multiples of 32"):
        hybrid.linear("mtp.0.ffn.experts.0.w1", rows=slice(16, 48))
    with pytest.raises(MissingTensor, match="no matrix"):
        exl3.linear("layers.0.attn.nothing")


def test_packed_signs_bias_and_codebook(tmp_path: Path) -> None:
    prefix = "layers.0.attn.wq_a"
    signs = np.array([0x8001, 0, 0xFFFF, 0, 0, 0, 0, 2], np.uint16)
    bias = np.arange(128).astype("<f2")

    def old_style(tensors: dict) -> None:
        for name in ("suh", "mul1", "mcg"):
            tensors.pop(f"{prefix}.{name}", None)
        tensors[f"{prefix}.su"] = ("I16", [8], signs.tobytes())
        tensors[f"{prefix}.bias"] = ("F16", [128], bias.tobytes())

    pack = tiny.copy_pack(tiny.exl3_path(), tmp_path / "p")
    rewrite(shard_of(pack, f"{prefix}.suh"), old_style)
    matrix = PackWeights(open_pack(pack)).linear(prefix)
    assert isinstance(matrix, Exl3Matrix) and matrix.codebook is Codebook.THREEINST
    assert matrix.bias is not None and torch.equal(matrix.bias, torch.arange(128).half())
    expected = torch.ones(128)
    expected[[0, 15, *range(32, 48), 113]] = -1
    assert torch.equal(matrix.suh, expected.half())


def test_a_bias_is_in_the_first_input_slice_only(tmp_path: Path) -> None:
    name = "layers.0.attn.wo_b"
    source = open_pack(tiny.exl3_path())
    size = source.config.hidden_size
    rows = [
        TensorData(n, source.info(n).dtype, source.info(n).shape, source.array(n).tobytes())
        for n in source.names
    ]
    rows.append(TensorData(f"{name}.bias", "F16", (size,), np.ones(size, np.float16).tobytes()))
    write_pack(tmp_path / "p", source.config_json, rows)
    weights = PackWeights(open_pack(tmp_path / "p"))
    halves = [weights.linear(name, rows=slice(a, a + 128)) for a in (0, 128)]
    assert [half.bias is not None for half in halves] == [True, False]
    assert weights.linear(name).bias is not None


def test_the_marker_chooses_the_codebook(tmp_path: Path) -> None:
    name = "layers.0.attn.wq_a"
    source = open_pack(tiny.exl3_path())
    kept = [n for n in source.names if not n.startswith(f"{name}.m")]
    rows = [
        TensorData(n, source.info(n).dtype, source.info(n).shape, source.array(n).tobytes())
        for n in kept
    ]
    word = np.array(CODEBOOK_MARKERS["mcg"], np.uint32).tobytes()
    marked = [*rows, TensorData(f"{name}.mcg", "I32", (), word)]
    write_pack(tmp_path / "mcg", source.config_json, marked)
    write_pack(tmp_path / "none", source.config_json, rows)
    found = [PackWeights(open_pack(tmp_path / n)).linear(name).codebook for n in ("mcg", "none")]
    assert found == [Codebook.MCG, Codebook.THREEINST]


def test_wider_copies_are_narrowed_only_without_loss(tmp_path: Path) -> None:
    name = "layers.0.ffn.gate.weight"
    values = tiny_weights.values(
        next(t for t in tiny_weights.tensors(tiny.CONFIG) if t.name == name)
    )
    exact = values.astype("<f2")
    assert np.array_equal(exact.astype(np.float32), values)
    rounded = exact.copy()
    rounded[0, 0] = np.float16(1.001)  # no bf16 value

    for stored, dtype in ((exact, torch.bfloat16), (rounded, torch.float32)):
        pack = tiny.copy_pack(tiny.plain_path(), tmp_path / str(dtype))
        bias = np.array([0.1] * 8, "<f2")

        def change(tensors: dict, stored: np.ndarray = stored, bias: np.ndarray = bias) -> None:
            tensors[name] = ("F16", list(stored.shape), stored.tobytes())
            tensors["layers.0.ffn.gate.bias"] = ("F16", [8], bias.tobytes())

        rewrite(pack / "model.safetensors", change)
        weights = PackWeights(open_pack(pack))
        assert weights.plain(name).dtype == dtype
        assert torch.equal(weights.plain(name).float(), torch.from_numpy(stored).float())
        assert weights.plain("layers.0.ffn.gate.bias").dtype == torch.float32
    assert narrowed(torch.tensor([1e-40]), torch.bfloat16).dtype == torch.float32


def test_engram_rows(plain: PackWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    table = plain.engram_rows(4)
    ids = torch.tensor([[0, 13415], [7, 7]])
    rows = table.gather(ids)
    assert rows.shape == (2, 2, 64) and rows.dtype == torch.bfloat16
    t = next(
        t for t in tiny_weights.tensors(tiny.CONFIG) if t.name.endswith("4.engram.embed.weight")
    )
    assert torch.equal(rows.float(), torch.from_numpy(tiny_weights.values(t)[ids.numpy()]))
    monkeypatch.setattr("twinspark.pack.weights._RESIDENT_BYTES", 0)
    lazy = plain.engram_rows(4)
    assert torch.equal(lazy.gather(ids), rows)
    assert torch.equal(lazy.gather(ids.numpy()), rows)
    assert lazy.gather(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, 64)
    raw = plain.pack.array("layers.4.engram.embed.weight")
    scale = plain.pack.array("layers.4.engram.embed.scale")
    direct = dequant_engram(torch.from_numpy(raw[7].copy()), torch.from_numpy(scale[7].copy()))
    assert torch.equal(direct, rows[1, 0])
    for bad in (-1, 13416):
        with pytest.raises(IndexError, match=r"0\.\.13415"):
            table.gather(torch.tensor([bad]))


def test_load_of_save_is_the_same(tmp_path: Path, exl3: PackWeights) -> None:
    config = tiny.config()
    write_pack(tmp_path / "again", tiny.CONFIG, tiny.tensors(config, tiny.exl3_linear))
    again = open_pack(tmp_path / "again")
    assert again.names == exl3.pack.names
    for name in again.names:
        assert again.array(name).tobytes() == exl3.pack.array(name).tobytes(), name


def test_a_plain_copy_of_an_exl3_pack_holds_the_same_matrices(
    tmp_path: Path, exl3: PackWeights
) -> None:
    def dense_linear(spec: LinearSpec) -> Iterator[TensorData]:
        prefixes = [spec.prefix]
        if spec.groups > 1:
            prefixes = [f"{spec.prefix}.slice.{g}" for g in range(spec.groups)]
        whole = torch.cat([dense(exl3.linear(p)) for p in prefixes], dim=1).t()
        array = whole.float().contiguous().numpy()
        yield TensorData(f"{spec.prefix}.weight", "F32", array.shape, array)

    write_pack(tmp_path / "plain", tiny.CONFIG, tiny.tensors(tiny.config(), dense_linear))
    plain = PackWeights(open_pack(tmp_path / "plain"))
    for prefix in ("head", "layers.1.engram.wkv", "layers.6.attn.wo_a.slice.1", "mtp.0.main_proj"):
        matrix = plain.linear(prefix)
        assert isinstance(matrix, PlainMatrix) and matrix.weight.dtype == torch.float32
        assert torch.equal(dense(matrix), dense(exl3.linear(prefix)).float().double())


def test_engram_rows_as_stored_are_the_same_rows():
    pack = open_pack(tiny.hybrid_path())
    layer = pack.config.engram_layer_ids[0]
    table = PackWeights(pack).engram_rows(layer)
    ids = torch.tensor([[3, 0], [table.num_rows - 1, 3]])
    stored = table.gather_bytes(ids)
    assert stored is not None and stored[0].shape == (2, 2, table.width)
    assert torch.equal(dequant_engram(*stored), table.gather(ids))
    with pytest.raises(IndexError, match="row ids"):
        table.gather_bytes(torch.tensor([table.num_rows]))
    bf16 = EngramTable(np.zeros((4, 32), np.uint16), None)
    assert bf16.gather_bytes(torch.tensor([1])) is None


@pytest.mark.parametrize("resident_bytes", [64 << 20, 0])
def test_engram_rows_are_put_where_a_device_is_sent_them_from(
    resident_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinspark.pack.weights._RESIDENT_BYTES", resident_bytes)
    pack = open_pack(tiny.hybrid_path())
    stored = PackWeights(pack).engram_rows(pack.config.engram_layer_ids[0])
    words = np.arange(4 * 32, dtype=np.uint16).reshape(4, 32)
    for table in (stored, EngramTable(words, None)):
        ids = np.array([3, 0, table.num_rows - 1, 3])
        types = {torch.bfloat16: np.int16, torch.uint8: np.uint8}
        into = [np.zeros((len(ids), width), types[dtype]) for dtype, width in table.row_fields]
        table.put(ids, into)
        wanted = table.gather(ids)
        if len(into) == 2:  # tables that are not held stay in their bytes
            found = dequant_engram(*map(torch.from_numpy, into))
        else:
            found = torch.from_numpy(into[0]).view(torch.bfloat16)
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
    assert (len(stored.row_fields) == 2) == (resident_bytes == 0)
