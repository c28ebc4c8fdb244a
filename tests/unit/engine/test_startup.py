"""Measuring at a start: how far it is told to be, and that whoever is told may end it."""

import pytest

from twinspark.config.engine import EngineConfig
from twinspark.config.paths import demo_pack_path
from twinspark.engine.core import Engine
from twinspark.engine.startup import MEASURING, load_engine

CONFIG = EngineConfig(device="cpu", slots=1, max_context_tokens=512)


@pytest.fixture(autouse=True)
def first_start(tmp_path, monkeypatch):
    """Nothing was measured before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_first_start_tells_how_far_its_measuring_is():
    told = []
    loaded = load_engine(
        demo_pack_path(), CONFIG, on_progress=lambda *what: told.append(what), verify=False
    )
    loaded.close()
    fractions = [done for phase, done in told if phase == MEASURING]
    assert len(fractions) > 10 and fractions == sorted(fractions)
    assert fractions[0] == 0.0 and 0 < fractions[1] < 0.5 and fractions[-1] == 1.0


def test_what_is_told_may_end_the_measuring(monkeypatch):
    class Ended(Exception):
        pass

    closed, close = [], Engine.close
    monkeypatch.setattr(Engine, "close", lambda engine: (closed.append(engine), close(engine)))

    def told(phase, done):
        if phase == MEASURING and done > 0:
            raise Ended

    with pytest.raises(Ended):
        load_engine(demo_pack_path(), CONFIG, on_progress=told, verify=False)
    assert len(closed) == 1
