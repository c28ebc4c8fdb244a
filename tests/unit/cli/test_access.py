"""Keys from flags, environment and file; the environment loses its secrets."""

import hashlib
import os
from pathlib import Path

import pytest

from twinspark.cli.access import open_keys, warn_if_open
from twinspark.config.load import SettingsSources, make_settings, read_sources
from twinspark.config.server import SamplingDefaults, ServerConfig
from twinspark.errors import ConfigError
from twinspark.server.keys import KeyRing

SECRET, OTHER = "a-key-of-the-house", "another-key-of-it"
DIGEST = hashlib.sha256(OTHER.encode()).hexdigest()


def sources(**environ: str) -> SettingsSources:
    return read_sources(environ={f"TWINSPARK_{name}": value for name, value in environ.items()})


def test_all_sources_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("file: key-of-the-file\n")
    path.chmod(0o600)
    monkeypatch.setenv("TWINSPARK_API_KEYS", f"env: {SECRET}")
    found = read_sources()
    assert SECRET not in repr(found)
    ring = open_keys(ServerConfig(api_keys_file=str(path)), found, [f"flag: sha256={DIGEST}"])
    labels = [ring.find(key).label for key in ("key-of-the-file", SECRET, OTHER)]
    assert labels == ["file", "env", "flag"]
    assert "TWINSPARK_API_KEYS" not in os.environ  # the engine's process must not get it


def test_without_keys_nothing_is_asked_for() -> None:
    assert not open_keys(ServerConfig(), sources(), ()).is_required
    for config in (ServerConfig(key_requests=1), ServerConfig(metrics_open=True)):
        with pytest.raises(ConfigError, match="no effect without keys"):
            open_keys(config, sources(), ())


def test_a_bad_variable_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="TWINSPARK_API_KEYS, key 2") as found:
        open_keys(ServerConfig(), sources(API_KEYS=f"{SECRET},x"), ())
    assert SECRET not in str(found.value)


def test_r100_only_an_open_bind_without_keys_is_warned_of(capsys: pytest.CaptureFixture) -> None:
    keys = open_keys(ServerConfig(), sources(API_KEYS=SECRET), ())
    warn_if_open(ServerConfig(), None)
    warn_if_open(ServerConfig(host="0.0.0.0"), keys)
    assert capsys.readouterr().err == ""
    warn_if_open(ServerConfig(host="0.0.0.0"), KeyRing())
    assert "WARNING" in capsys.readouterr().err


def test_lists_and_words_of_a_settings_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('[server]\ncors_origins = ["*"]\nreasoning_fields = "reasoning"\n')
    config = make_settings(ServerConfig, "server", read_sources(path, environ={}))
    assert config.cors_origins == ("*",) and config.reasoning_fields == "reasoning"
    for line in ("cors_origins = [1]", 'reasoning_fields = "some"', "cors_origins = 5"):
        path.write_text(f"[server]\n{line}\n")
        with pytest.raises(ConfigError):
            make_settings(ServerConfig, "server", read_sources(path, environ={}))


def test_every_flag_of_the_server_reaches_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from twinspark.cli import serve
    from twinspark.cli.main import app

    seen: list[ServerConfig] = []
    monkeypatch.setattr(serve, "_open", lambda *args, **options: (None, None))
    monkeypatch.setattr(
        serve, "run_server", lambda pack, config, *args, **options: seen.append(config)
    )
    flags = (
        "--host 127.0.0.2 --port 1 --model-name m --alias a --alias b --keepalive 2 --grace 3 "
        "--request-log x --temperature 0.5 --allowed-host h --cors-origin * "
        "--reasoning-fields none "
        "--surface-unterminated-reasoning --reproducible-seeds --metrics-open --key-requests 4 "
        f"--key-tokens-per-hour 5 --api-key-digest sha256={DIGEST}"
    )
    result = CliRunner().invoke(app, ["serve", *flags.split()], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    expected = ServerConfig(
        host="127.0.0.2", port=1, model_name="m", model_aliases=("a", "b"), keepalive_s=2.0,
        shutdown_grace_s=3.0, request_log="x", allowed_hosts=("h",), cors_origins=("*",),
        reasoning_fields="none", surface_unterminated_reasoning=True, reproducible_seeds=True,
        metrics_open=True, key_requests=4, key_tokens_per_hour=5,
        sampling=SamplingDefaults(temperature=0.5),
    )  # fmt: skip
    assert seen == [expected]


def test_a_rank_that_follows_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from twinspark.cli import ranks
    from twinspark.cli.main import app

    seen: list[bool] = []

    def follows(*args: object, **how: object) -> bool:
        seen.append("TWINSPARK_API_KEYS" in os.environ)
        return True

    monkeypatch.setenv("TWINSPARK_API_KEYS", SECRET)
    monkeypatch.setattr(ranks, "follows", follows)
    flags = "serve --tp 2 --rank 1 --rendezvous 127.0.0.1:9"
    result = CliRunner().invoke(app, flags.split(), catch_exceptions=False)
    assert result.exit_code == 0 and seen == [False]
