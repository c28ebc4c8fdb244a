"""What a user chooses about the server: address, limits, timing, defaults of requests.

Values come from flags (`cli/serve.py`); ranges are checked here. Read next: `server/app.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from math import isfinite
from typing import Any, Literal, get_args

from twinspark.errors import ConfigError
from twinspark.messages import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, MAX_TOP_K, Sampling

LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
ReasoningFields = Literal["both", "reasoning_content", "reasoning", "none"]
MAX_UNREAD_S = 86400
# The engine's own limits (`engine/request.py`), so that no default makes it refuse every request.
_SAMPLING_RANGES: dict[str, float | None] = {
    "temperature": HIGHEST_TEMPERATURE, "top_p": 1.0, "top_k": None, "min_p": 1.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What the user sets for numbers that a request leaves out; None leaves it to the pack.

    Attributes:
        temperature: 0 is greedy.
        top_p: 1.0 is off.
        top_k: 0 is off.
        min_p: 0.0 is off.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        for name in _SAMPLING_RANGES:
            if getattr(self, name) is not None:
                _check_sampling(f"sampling.{name}", name, getattr(self, name))

    def over(self, generation_config: Mapping[str, Any]) -> Sampling:
        """Fill the gaps from a pack's generation_config.json, then from our own defaults.

        Raises:
            ConfigError: a key of the pack's file has a value out of its range.
        """
        found: dict[str, Any] = {}
        for name in _SAMPLING_RANGES:
            value = generation_config.get(name)
            if value is not None:
                _check_sampling(f"generation_config.json: {name}", name, value)
                found[name] = int(value) if name == "top_k" else float(value)
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if generation_config.get("do_sample") is False and self.temperature is None:
            found["temperature"] = 0.0
        if "top_k" in found:
            found["top_k"] = min(int(found["top_k"]), MAX_TOP_K)
        return Sampling(**found)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one server process. Times are in seconds, sizes in bytes.

    Attributes:
        model_name: the name replies and the model list carry; None is the pack's name.
        host: address to bind; loopback unless the user says otherwise.
        port: 0 takes a free one.
        keepalive_s: gap between comment lines of a stream that waits for its first token;
            0 sends none, and such a stream holds its headers until it is admitted.
        shutdown_grace_s: how long running replies may go on after the first stop signal.
        max_body_bytes: longest request body.
        max_nesting: deepest nesting of arrays and objects in a body.
        default_max_tokens: reply limit of requests that name none, capped to what the context
            leaves; None is all the context leaves.
        request_log: file that gets one JSON line a request; None sends the lines to the log.
        sampling: defaults of the numbers a request leaves out.
        model_aliases: further names that clients may ask for.
        api_keys_file: file of keys, one a line; it may change while the server runs.
        key_requests: most replies at a time of one key; None is any number.
        key_tokens_per_hour: most tokens of one key, prompts and replies together.
        metrics_open: metrics need no key.
        allowed_hosts: names in the Host header that a server on a loopback address goes by, besides
            those of the machine itself.
        cors_origins: origins whose pages may use the server; "*" is every one.
        unread_s: a connection whose client takes nothing for so long is ended; 0 waits for ever.
        unsent_s: a request of whose body less than 1 KiB a second comes for so long is refused; 0
            waits for ever.
        body_s: one whose body takes longer than this is refused; 0 waits for ever.
        stall_s: a reply that stands still for longer is reported as stalled; 0 reports none.
        give_up_s: a request that stands still for longer is ended with an error; 0 waits for ever.
        reasoning_fields: names under which replies give reasoning; "none" leaves it out.
        surface_unterminated_reasoning: a reply that ends inside its thinking block gives that as
            its content too.
        reproducible_seeds: a request without a seed gets one from its prompt.
        page: whether a page for people is served at `/`.
    """

    model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    keepalive_s: float = 15.0
    shutdown_grace_s: float = 5.0
    max_body_bytes: int = 64 * 1024 * 1024
    max_nesting: int = 64
    default_max_tokens: int | None = None
    request_log: str | None = None
    sampling: SamplingDefaults = SamplingDefaults()
    model_aliases: tuple[str, ...] = ()
    api_keys_file: str | None = None
    key_requests: int | None = None
    key_tokens_per_hour: int | None = None
    metrics_open: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    unread_s: float = 60.0
    unsent_s: float = 60.0
    body_s: float = 3600.0
    stall_s: float = 30.0
    give_up_s: float = 600.0
    reasoning_fields: ReasoningFields = "both"
    surface_unterminated_reasoning: bool = False
    reproducible_seeds: bool = False
    page: bool = True

    def __post_init__(self) -> None:
        if self.model_name == "":
            raise ConfigError("model_name is empty; give the name that clients shall see")
        if self.request_log == "":
            raise ConfigError("request_log is empty; name a file")
        _check_number("port", self.port, 0, 65535)
        _check_number("keepalive_s", self.keepalive_s, 0, None)
        _check_number("shutdown_grace_s", self.shutdown_grace_s, 0, None)
        _check_number("max_body_bytes", self.max_body_bytes, 1, None)
        _check_number("max_nesting", self.max_nesting, 4, 512)
        _check_number("unread_s", self.unread_s, 0, MAX_UNREAD_S)
        _check_number("unsent_s", self.unsent_s, 0, None)
        _check_number("body_s", self.body_s, 0, None)
        _check_number("stall_s", self.stall_s, 0, None)
        _check_number("give_up_s", self.give_up_s, 0, None)
        for name in ("default_max_tokens", "key_requests", "key_tokens_per_hour"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), 1, None)
        if self.reasoning_fields not in get_args(ReasoningFields):
            names = ", ".join(get_args(ReasoningFields))
            raise ConfigError(
                f"reasoning_fields is {self.reasoning_fields!r}, expected one of {names}"
            )
        if "" in self.model_aliases:
            raise ConfigError("model_aliases has an empty name; give names that clients ask for")
        self._check_access()
        if not isinstance(self.sampling, SamplingDefaults):
            raise ConfigError(f"[server.sampling] must be a table, got {self.sampling!r}")

    def _check_access(self) -> None:
        if self.api_keys_file == "":
            raise ConfigError("api_keys_file is empty; name a file")
        if self.allowed_hosts and not self.is_loopback:
            raise ConfigError(
                f"allowed_hosts has no effect on {self.host}: Host headers are only looked at on a "
                "loopback address; leave it out"
            )
        for host in self.allowed_hosts:
            if not host or set(host) & set("/:@ "):
                raise ConfigError(
                    f"allowed_hosts has {host!r}, expected a name without scheme or port"
                )
        for origin in self.cors_origins:
            scheme, _, rest = origin.partition("://")
            if origin != "*" and not (scheme and rest and "/" not in rest):
                raise ConfigError(
                    f"cors_origins has {origin!r}, expected '*' or an origin such as "
                    "http://localhost:3000, without a path"
                )

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        if self.host in LOOPBACK_NAMES:
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False


def _check_sampling(where: str, name: str, value: Any) -> None:
    _check_number(where, value, 0, _SAMPLING_RANGES[name])
    if name == "temperature" and 0 < value < LOWEST_TEMPERATURE:
        raise ConfigError(
            f"{where} is {value}, expected 0 (greedy) or at least {LOWEST_TEMPERATURE:g}"
        )
    if name == "top_k" and value != int(value):
        raise ConfigError(f"{where} is {value}, expected a whole number, 0 (off) or more")


def _check_number(name: str, value: Any, low: float, high: float | None) -> None:
    limits = f"{low:g} or more" if high is None else f"{low:g} to {high:.9g}"
    if not _is_finite(value):
        raise ConfigError(f"{name} is {value!r}, expected a number, {limits}")
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{name} is {value}, expected {limits}")


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False
