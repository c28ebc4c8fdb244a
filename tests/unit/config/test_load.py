"""Flags, environment and file: who wins, and that nothing unknown is ignored."""

from pathlib import Path

import pytest

from twinspark.config.engine import EngineConfig
from twinspark.config.env import PREFIX, VARIABLES, read_environment
from twinspark.config.load import SECTIONS, make_settings, read_sources
from twinspark.config.server import ServerConfig
from twinspark.errors import ConfigError

SETTINGS = {"engine": EngineConfig, "server": ServerConfig}


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "settings.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_without_anything_the_defaults_hold():
    sources = read_sources(environ={})
    assert make_settings(EngineConfig, "engine", sources) == EngineConfig()
    assert sources.log_level == "info"


def test_a_flag_wins_over_the_environment_and_that_over_the_file(write):
    path = write("[engine]\nthreads = 3\nslots = 2\n[server]\nport = 1\nkeepalive_s = 2\n")
    environ = {"TWINSPARK_THREADS": "5", "TWINSPARK_PORT": "7"}
    sources = read_sources(path, environ=environ)
    found = make_settings(EngineConfig, "engine", sources, {"threads": None})
    assert (found.threads, found.slots) == (5, 2)
    assert make_settings(EngineConfig, "engine", sources, {"threads": 6}).threads == 6
    server = make_settings(ServerConfig, "server", sources)
    assert (server.port, server.keepalive_s) == (7, 2.0)
    assert make_settings(EngineConfig, "engine", read_sources(path, environ={})).threads == 3


def test_the_file_may_come_from_the_environment(write):
    path = write("[engine]\ndraft = false\n")
    sources = read_sources(environ={"TWINSPARK_CONFIG": str(path), "TWINSPARK_THREADS": ""})
    assert make_settings(EngineConfig, "engine", sources) == EngineConfig(draft=False)


def test_nested_settings_come_from_a_nested_table(write):
    path = write("[server.sampling]\ntemperature = 0\ntop_k = 5\n")
    found = make_settings(ServerConfig, "server", read_sources(path, environ={}))
    assert found.sampling.temperature == 0.0 and found.sampling.top_k == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[engine]\nslot = 2\n", "slots"), ("[engine]\nslots = '2'\n", "expected int"),
        ("[engine]\nslots = true\n", "expected int"), ("[engine]\ndraft = 1\n", "expected bool"),
        ("[engine]\nslots = 0\n", "1 to 256"), ("[engin]\nslots = 2\n", r"\[engine\]"),
        ("slots = 2\n", r"\[engine\]"), ("[engine\n", "TOML"), ("[engine]\nthreads = 1.5\n", "int"),
        ("[server.sampling]\ntemp = 1\n", "temperature"),
    ],
)  # fmt: skip
def test_mistakes_in_the_file_are_refused_with_what_is_known(text, said, write):
    with pytest.raises(ConfigError, match=said):
        sources = read_sources(write(text), environ={})
        for section, cls in SETTINGS.items():
            make_settings(cls, section, sources)


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError, match="nowhere"):
        read_sources(Path("/nowhere/settings.toml"), environ={})


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="TOML"):
        read_sources(path, environ={})


@pytest.mark.parametrize("name", ["TWINSPARK_THREAD", "TWINSPARK_", "TWINSPARK_FAST_MODE"])
def test_unknown_variables_are_errors(name):
    with pytest.raises(ConfigError, match="TWINSPARK_THREADS"):
        read_environment({name: "1"})


def test_a_variable_of_the_wrong_type_is_an_error():
    with pytest.raises(ConfigError, match="integer"):
        read_environment({"TWINSPARK_THREADS": "two"})
    with pytest.raises(ConfigError, match="warning"):
        _ = read_sources(environ={"TWINSPARK_LOG_LEVEL": "loud"}).log_level


def test_foreign_variables_are_left_alone():
    assert read_environment({"PATH": "/bin", "TWINSPARKLE": "1"}) == {}


def test_the_variables_are_few_and_name_real_settings():
    assert len(VARIABLES) <= 10
    for variable in VARIABLES:
        assert variable.name.startswith(PREFIX) and variable.help
        if variable.setting is not None:
            section, name = variable.setting.split(".")
            assert section in SECTIONS and name in SETTINGS[section].__dataclass_fields__


def test_a_flag_that_no_setting_has_is_refused():
    with pytest.raises(ConfigError, match="slots"):
        make_settings(EngineConfig, "engine", read_sources(environ={}), {"slot": 1})
