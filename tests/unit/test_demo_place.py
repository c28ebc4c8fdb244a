"""A carried pack is put together again, and nothing of the one before stays."""

import errno
import json
import shutil
from pathlib import Path

import pytest
from tools.demo.place import config_of, main, place

from twinspark.config.paths import demo_pack_path
from twinspark.errors import ChecksumError, FormatError, TwinSparkError


@pytest.fixture
def result(tmp_path):
    """What the demo pack would be carried as."""
    folder = tmp_path / "result"
    folder.mkdir()
    for name in ("model.safetensors", "config.json"):
        shutil.copyfile(demo_pack_path() / name, folder / f"mix.{name}")
    return folder


def test_the_demo_pack_comes_together_as_it_was(result, tmp_path, monkeypatch, capsys):
    given = [str(result), str(demo_pack_path()), str(tmp_path / "pack")]
    monkeypatch.setattr("sys.argv", ["place", *given])
    main()
    size = sum(path.stat().st_size for path in demo_pack_path().iterdir())
    assert f"{size:,} bytes" in capsys.readouterr().out
    names = sorted(path.name for path in demo_pack_path().iterdir())
    assert sorted(path.name for path in (tmp_path / "pack").iterdir()) == names
    for name in names:
        assert (tmp_path / "pack" / name).read_bytes() == (demo_pack_path() / name).read_bytes()


def test_a_width_has_the_config_of_the_mix_but_its_bits(result):
    mix = json.loads((result / "mix.config.json").read_text())
    found = config_of(result, "3")
    quantization = found.pop("quantization_config")
    assert found == {k: v for k, v in mix.items() if k != "quantization_config"}
    assert (quantization["bits"], quantization["mtp_bits"]) == (3.0, 3)
    assert quantization["calibration"] == mix["quantization_config"]["calibration"]
    (result / "3.config.json").write_text('{"its": "own"}')
    assert config_of(result, "3") == {"its": "own"}
    (result / "mix.config.json").write_text('{"its": "own"}')
    with pytest.raises(FormatError, match=r"mix\.config\.json has no object quantization_config"):
        config_of(result, "2")


def test_what_is_missing_or_in_the_way_is_told(result, tmp_path):
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "pack"
    checkpoint.mkdir()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        place(result, checkpoint, folder, "mix", replace=False)
    shutil.copyfile(demo_pack_path() / "tokenizer.json", checkpoint / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match=r"3\.model\.safetensors is missing"):
        place(result, checkpoint, folder, "3", replace=False)
    with pytest.raises(FileNotFoundError, match=r"neither other\.config\.json nor"):
        place(result, checkpoint, folder, "other", replace=False)
    folder.mkdir()
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    with pytest.raises(FileExistsError, match="not empty"):
        place(result, checkpoint, folder, "mix", replace=False)
    place(result, checkpoint, folder, "mix", replace=True)
    assert not (folder / "generation_config.json").exists()


@pytest.fixture
def old(tmp_path):
    """A pack that is there already."""
    folder = tmp_path / "packs" / "old"
    shutil.copytree(demo_pack_path(), folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path, count=1000):
    """Other bytes where only weights are."""
    data = bytearray(path.read_bytes())
    for n in range(len(data) - count, len(data)):
        data[n] ^= 255
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def spoil(path):
    path.write_text("{broken")


def reshape(path):
    """Weights of another model: whole, but of other sizes than the config says."""
    config = json.loads(path.read_text())
    config["text_config"]["hidden_size"] *= 2
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("mix.model.safetensors", cut, r"model\.safetensors is cut short"),
        ("mix.model.safetensors", flip, r"mix\.model\.safetensors: expected blake3"),
        ("mix.config.json", spoil, r"mix\.config\.json"),
        ("mix.config.json", reshape, r"config\.json disagrees"),
        ("mix.twinspark.json", spoil, r"twinspark\.json"),
    ],
)
def test_what_came_damaged_leaves_the_pack_that_was_there(result, old, name, damage, said):
    shutil.copyfile(demo_pack_path() / "twinspark.json", result / "mix.twinspark.json")
    damage(result / name)
    before = contents(old)
    with pytest.raises(TwinSparkError, match=said):
        place(result, demo_pack_path(), old, "mix", replace=True)
    assert contents(old) == before
    assert list(old.parent.iterdir()) == [old]


def test_a_config_that_is_not_the_one_of_the_weights_is_found(result, tmp_path):
    shutil.copyfile(demo_pack_path() / "twinspark.json", result / "mix.twinspark.json")
    config = result / "mix.config.json"
    config.write_text(config.read_text().replace("\n", "\n "))
    with pytest.raises(ChecksumError, match=r"mix\.config\.json: expected blake3"):
        place(result, demo_pack_path(), tmp_path / "pack", "mix", replace=False)


def test_a_manifest_that_is_of_something_else_is_refused(result, tmp_path):
    (result / "mix.twinspark.json").write_text('{"format": 1, "files": {}}')
    with pytest.raises(FormatError, match=r"lists no model\.safetensors"):
        place(result, demo_pack_path(), tmp_path / "pack", "mix", replace=False)


@pytest.mark.parametrize("name", ["mix.model.safetensors", "tokenizer.json"])
def test_a_full_disk_leaves_the_pack_that_was_there(result, old, monkeypatch, name):
    whole = shutil.copyfile

    def copyfile(source, to):
        if Path(source).name == name:
            Path(to).write_bytes(b"some")
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(source, to)

    before = contents(old)
    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with pytest.raises(OSError, match="No space left"):
        place(result, demo_pack_path(), old, "mix", replace=True)
    assert contents(old) == before
    assert list(old.parent.iterdir()) == [old]


def test_a_pack_that_does_not_answer_takes_no_place(result, old, capsys):
    asked = []

    def ask(pack):
        asked.append(contents(pack).keys() == contents(demo_pack_path()).keys())
        raise TwinSparkError("it does not load")

    before = contents(old)
    with pytest.raises(TwinSparkError, match="it does not load"):
        place(result, demo_pack_path(), old, "mix", replace=True, ask=ask)
    assert asked == [True] and contents(old) == before
    assert "only the structure of the weights is checked" in capsys.readouterr().out


def test_a_swap_that_fails_half_way_is_undone(result, old, monkeypatch):
    rename = Path.rename

    def fails(path, to):
        if path.name.endswith(".new"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, to)

    before = contents(old)
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="Input/output"):
        place(result, demo_pack_path(), old, "mix", replace=True)
    assert contents(old) == before
    assert list(old.parent.iterdir()) == [old]


def test_shards_and_index_of_the_pack_before_are_gone(result, old):
    (old / "model.safetensors").rename(old / "model-00001-of-00001.safetensors")
    (old / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (old / "engram-1.safetensors").write_bytes(b"")
    place(result, demo_pack_path(), old, "mix", replace=True)
    assert contents(old) == contents(demo_pack_path())
    assert list(old.parent.iterdir()) == [old]


def test_what_the_pack_is_made_from_is_no_place_for_it(result, tmp_path):
    checkpoint = tmp_path / "demo" / "checkpoint"
    shutil.copytree(demo_pack_path(), checkpoint)
    (tmp_path / "link").symlink_to(checkpoint)
    kept = contents(checkpoint), contents(result)
    folders = [checkpoint, checkpoint / "pack", checkpoint.parent, tmp_path / "link", result]
    for folder in folders:
        with pytest.raises(ValueError, match="would share files with"):
            place(result, checkpoint, folder, "mix", replace=True)
    assert (contents(checkpoint), contents(result)) == kept


def test_a_folder_that_is_no_pack_is_not_replaced(result, old):
    (old / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt belongs to no pack"):
        place(result, demo_pack_path(), old, "mix", replace=True)
    with pytest.raises(FileExistsError, match="is a file; expected a folder"):
        place(result, demo_pack_path(), old / "notes.txt", "mix", replace=True)
    assert (old / "notes.txt").read_text() == "mine"


def test_an_error_is_one_line(result, old, monkeypatch):
    cut(result / "mix.model.safetensors")
    given = [str(result), str(demo_pack_path()), str(old), "--replace"]
    monkeypatch.setattr("sys.argv", ["place", *given])
    with pytest.raises(SystemExit, match=r"nothing was placed: model\.safetensors is cut short"):
        main()
