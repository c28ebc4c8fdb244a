"""A carried pack is put together again, and nothing of the one before stays."""

import json
import shutil

import pytest
from tools.demo.place import config_of, main, place

from twinspark.config.paths import demo_pack_path
from twinspark.errors import TwinSparkError


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


def test_weights_that_came_damaged_are_refused(result, tmp_path):
    weights = result / "mix.model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(TwinSparkError, match=r"model\.safetensors"):
        place(result, demo_pack_path(), tmp_path / "pack", "mix", replace=False)
