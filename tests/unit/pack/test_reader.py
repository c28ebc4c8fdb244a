"""Opening packs: what loads, and each kind of damage with its own error before torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests import tiny
from tests.golden import tiny_weights
from tests.unit.pack.damage import rewrite
from tests.unit.pack.damages import DAMAGES, Damage, first_shard

from twinspark.errors import ChecksumError, FormatError, MissingTensor
from twinspark.kernels.exl3.codebook import MARKERS
from twinspark.pack.check import Storage
from twinspark.pack.format import CODEBOOK_MARKERS
from twinspark.pack.reader import open_pack


def test_plain_pack() -> None:
    pack = open_pack(tiny.plain_path())
    assert pack.config == tiny.config()
    assert pack.linear_kind("head") is Storage.PLAIN
    assert pack.info("embed.weight").shape == (512, 128)
    assert pack.array("embed.weight").dtype == "<u2"
    assert not pack.array("embed.weight").flags.writeable
    # the digest recorded with the golden model data
    assert tiny_weights.digest(tiny.CONFIG) == (
        "16c04623efec9122db23ac6fabe87c002fd341d8f0d1e0ef0c980b387e70e479"
    )
    with pytest.raises(MissingTensor, match="nothing"):
        pack.info("nothing")
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        _ = pack.tokenizer_path
    assert pack.generation_config == {}


def test_exl3_pack_is_ragged() -> None:
    pack = open_pack(tiny.exl3_path())
    assert set(pack.storage.values()) == {Storage.EXL3, Storage.EXL3_SLICES}
    assert pack.linear_kind("layers.0.attn.wo_a") is Storage.EXL3_SLICES
    widths = {
        pack.info(f"layers.5.ffn.experts.{e}.{w}.trellis").shape[2]
        for e in range(8)
        for w in ("w1", "w2", "w3")
    }
    assert len(widths) >= 5
    assert len({i.file for i in pack.tensors.values()}) > 2


def test_hybrid_pack() -> None:
    pack = open_pack(tiny.hybrid_path())
    assert set(pack.storage.values()) == {
        Storage.EXL3, Storage.PLAIN, Storage.FP8, Storage.MXFP4,
    }  # fmt: skip


def test_other_names_and_short_ratios(tmp_path: Path) -> None:
    def rename(tensors: dict) -> None:
        for name in list(tensors):
            other = name.replace(".attn.", ".self_attn.").replace(".ffn.", ".mlp.")
            other = other.replace("gate.bias", "gate.e_score_correction_bias")
            if "bias_vl" not in name:
                tensors["model." + other] = tensors[name]
            del tensors[name]
        tensors["vision.patch.weight"] = ("F32", [1], bytes(4))
        tensors["mtp.1.embed.weight"] = ("F32", [1], bytes(4))
        tensors["image_newline"] = ("F32", [1], bytes(4))

    ratios = tiny.CONFIG["text_config"]["compress_ratios"][:10]
    pack = tiny.copy_pack(tiny.plain_path(), tmp_path / "p", compress_ratios=ratios)
    rewrite(pack / "model.safetensors", rename)
    opened = open_pack(pack)
    assert "layers.0.ffn.gate.bias" in opened.names
    assert opened.info("layers.0.attn.wq_a.weight").name == "model.layers.0.self_attn.wq_a.weight"


def test_engram_tables_beside_and_elsewhere(tmp_path: Path) -> None:
    kept: dict[str, tuple[str, list[int], bytes]] = {}

    def take(tensors: dict) -> None:
        for name in [n for n in tensors if ".engram.embed." in n]:
            kept[name] = tensors.pop(name)

    pack = tiny.copy_pack(tiny.plain_path(), tmp_path / "p")
    rewrite(pack / "model.safetensors", take)
    with pytest.raises(MissingTensor, match=r"layers\.1\.engram\.embed\.weight \[12458, 64\]"):
        open_pack(pack)
    elsewhere = tmp_path / "release"
    elsewhere.mkdir()
    (elsewhere / "model-00047.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    rewrite(elsewhere / "model-00047.safetensors", lambda t: t.update(kept))
    assert ".weight" in str(
        open_pack(pack, engram_path=elsewhere).info("layers.1.engram.embed.weight")
    )
    (elsewhere / "model-00047.safetensors").rename(pack / "engram-00001.safetensors")
    assert open_pack(pack).info("layers.4.engram.embed.scale").file.name.startswith("engram")


MESSAGES: dict[str, str] = {}  # what each damage was refused with


@pytest.mark.parametrize("damage", DAMAGES, ids=[d[0] for d in DAMAGES])
def test_damage_is_refused(tmp_path: Path, damage: Damage) -> None:
    name, spoil, error, message = damage
    pack = tiny.copy_pack(tiny.exl3_path(), tmp_path / "pack")
    spoil(pack)
    with pytest.raises(error, match=message) as raised:
        open_pack(pack)
    MESSAGES[name] = str(raised.value).replace(str(pack), "PACK")


def test_messages_differ() -> None:
    if not MESSAGES:
        pytest.skip("no damage was refused before this")
    alike = {name for name, said in MESSAGES.items() if list(MESSAGES.values()).count(said) > 1}
    assert alike <= {"matrix missing", "trellis missing"}  # without its trellis it is missing


def test_manifest(tmp_path: Path) -> None:
    copy = tmp_path / "pack"
    tiny.copy_pack(tiny.exl3_path(), copy)
    manifest = (tiny.exl3_path() / "twinspark.json").read_text()
    (copy / "twinspark.json").write_text(manifest)
    open_pack(copy)
    shard = first_shard(copy)
    raw = bytearray(shard.read_bytes())
    raw[-3] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ChecksumError, match=r"model-00001-of-\d+\.safetensors: expected blake3"):
        open_pack(copy)
    open_pack(copy, verify=False)
    open_pack(copy, verify_limit_bytes=1000)
    config = copy / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(FormatError, match=r"config\.json: expected \d+ bytes.*--no-checksums"):
        open_pack(copy, verify_limit_bytes=1000)
    (copy / "twinspark.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(FormatError, match="format 2, this version reads 1"):
        open_pack(copy)


def test_no_pack_at_all(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="does not exist"):
        open_pack(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="is empty; supported are"):
        open_pack(tmp_path / "empty")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(FormatError, match="is a GGUF file; supported are"):
        open_pack(file)
    with pytest.raises(FormatError, match="folder of GGUF files; supported are"):
        open_pack(tmp_path)


def test_checks_come_before_torch() -> None:
    code = (
        "import sys\nfrom twinspark.pack.reader import open_pack\n"
        f"open_pack({str(tiny.exl3_path())!r})\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_marker_constants_agree() -> None:
    assert {k.value: v for k, v in MARKERS.items()} == CODEBOOK_MARKERS
