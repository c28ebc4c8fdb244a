"""The demo pack is found and named."""

from pathlib import Path

import pytest

from twinspark.config import paths
from twinspark.errors import ConfigError


def test_the_demo_pack_is_there_and_called_demo():
    assert (paths.demo_pack_path() / "config.json").is_file()
    assert paths.pack_name(paths.demo_pack_path()) == "demo"


def test_other_packs_are_called_after_their_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert paths.pack_name(Path("big-model/")) == "big-model"
    assert paths.pack_name(Path()) == tmp_path.name


def test_an_installation_without_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "_DEMO_PACK", tmp_path)
    with pytest.raises(ConfigError, match="no demo pack"):
        paths.demo_pack_path()
