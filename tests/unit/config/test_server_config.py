import pytest

from twinspark.config.server import SamplingDefaults, ServerConfig
from twinspark.engine.checks import check_sampling
from twinspark.errors import ConfigError, RequestError
from twinspark.messages import MAX_TOP_K, Sampling


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1}, {"port": 65536}, {"port": True}, {"keepalive_s": -1},
        {"keepalive_s": float("nan")}, {"shutdown_grace_s": -0.1}, {"max_body_bytes": 0},
        {"max_nesting": 2}, {"default_max_tokens": 0}, {"model_name": ""},
    ],
)  # fmt: skip
def test_values_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert ServerConfig(host=host).is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.local", ""])
def test_wider_than_loopback(host: str) -> None:
    assert not ServerConfig(host=host).is_loopback


def test_the_user_wins_over_the_pack_and_the_pack_over_us() -> None:
    pack = {"temperature": 0.6, "top_k": 20, "eos_token_id": 1, "min_p": None}
    assert SamplingDefaults().over({}) == Sampling()
    assert SamplingDefaults().over(pack) == Sampling(temperature=0.6, top_k=20)
    chosen = SamplingDefaults(temperature=0.0, top_p=1.0).over(pack)
    assert chosen == Sampling(temperature=0.0, top_p=1.0, top_k=20)


def test_a_pack_that_does_not_sample_is_greedy() -> None:
    assert SamplingDefaults().over({"do_sample": False, "temperature": 0.6}).temperature == 0.0
    assert SamplingDefaults(temperature=0.5).over({"do_sample": False}).temperature == 0.5


@pytest.mark.parametrize("pack", [{"top_p": 1.5}, {"temperature": "hot"}, {"top_k": -1}])
def test_a_pack_with_impossible_defaults(pack: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="generation_config.json"):
        SamplingDefaults().over(pack)
    with pytest.raises(ConfigError, match=r"sampling\.top_p"):
        SamplingDefaults(top_p=1.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e7), ("temperature", 1e-200), ("temperature", -1), ("top_p", 1.5),
        ("temperature", 10**400), ("top_k", 1.5), ("top_k", -1), ("min_p", 2), ("min_p", "much"),
    ],
)  # fmt: skip
def test_what_the_engine_refuses_is_refused_at_start(name: str, value: object) -> None:
    with pytest.raises(RequestError):
        check_sampling(Sampling(**{name: value}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"sampling\.{name}"):
        SamplingDefaults(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {name}"):
        SamplingDefaults().over({name: value})


def test_a_top_k_above_any_vocabulary_is_clamped() -> None:
    assert SamplingDefaults(top_k=2**70).over({}).top_k == MAX_TOP_K
    assert SamplingDefaults().over({"top_k": 1e29}).top_k == MAX_TOP_K


def test_sampling_must_be_a_table() -> None:
    with pytest.raises(ConfigError, match=r"\[server\.sampling\] must be a table, got 3"):
        ServerConfig(sampling=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"api_keys_file": ""}, "api_keys_file"),
        ({"key_requests": 0}, "key_requests"),
        ({"key_tokens_per_hour": 0}, "key_tokens_per_hour"),
        ({"unread_s": -1}, "unread_s"),
        ({"unsent_s": -1}, "unsent_s"),
        ({"body_s": -1}, "body_s"),
        ({"stall_s": float("inf")}, "stall_s"),
        ({"allowed_hosts": ("a",), "host": "0.0.0.0"}, "allowed_hosts"),
        ({"allowed_hosts": ("http://a",)}, "allowed_hosts"),
        ({"allowed_hosts": ("",)}, "allowed_hosts"),
        ({"cors_origins": ("localhost",)}, "cors_origins"),
        ({"cors_origins": ("http://a/b",)}, "cors_origins"),
        ({"model_aliases": ("",)}, "model_aliases"),
        ({"reasoning_fields": "some"}, "reasoning_fields"),
    ],
)
def test_what_access_settings_refuse(wrong: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**wrong)  # type: ignore[arg-type]


def test_access_settings() -> None:
    config = ServerConfig(
        allowed_hosts=("box.lan",), cors_origins=("*", "http://localhost:3000"), unread_s=0,
        model_aliases=("a", "b"), key_requests=1, reasoning_fields="none",
    )  # fmt: skip
    assert config.is_loopback and config.metrics_open is False and config.page
