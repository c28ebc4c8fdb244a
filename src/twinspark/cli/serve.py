"""`twinspark serve`: checks the pack, starts the engine process, serves HTTP, stops in order.

The only place where server and engine meet. The order is: pack checked (no torch), port bound,
engine started, HTTP stack imported while the engine loads. Read next: `server/app.py`,
`server/link.py`.
"""

import dataclasses
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from twinspark.cli import access, ranks
from twinspark.cli import serve_options as options
from twinspark.cli.access import warn_if_open
from twinspark.cli.console import LoadingLine, say
from twinspark.cli.hangups import end_by_hangups, heed_hangups
from twinspark.cli.interrupts import end_by_interrupts, raise_interrupts
from twinspark.cli.logs import set_up_logging
from twinspark.config.env import drop_secrets
from twinspark.errors import ConfigError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from twinspark.config.engine import EngineConfig
    from twinspark.config.server import SamplingDefaults, ServerConfig
    from twinspark.pack.reader import Pack
    from twinspark.server.keys import KeyRing
    from twinspark.server.link import EngineLink, EngineProcess
    from twinspark.text.tokenizer import Tokenizer

LISTEN_BACKLOG = 2048


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    pack: options.Pack = None,
    host: options.Host = None,
    port: options.Port = None,
    model_name: options.ModelName = None,
    alias: options.Aliases = None,
    slots: options.Slots = None,
    max_context: options.MaxContext = None,
    draft: options.Draft = None,
    threads: options.Threads = None,
    temperature: options.Temperature = None,
    keepalive: options.Keepalive = None,
    grace: options.Grace = None,
    request_log: options.RequestLog = None,
    reasoning_fields: options.ReasoningFields = None,
    surface_unterminated_reasoning: options.SurfaceReasoning = None,
    reproducible_seeds: options.ReproducibleSeeds = None,
    api_keys_file: access.KeysFile = None,
    api_key_digest: access.KeyDigests = None,
    key_requests: access.KeyRequests = None,
    key_tokens_per_hour: access.KeyTokens = None,
    metrics_open: access.MetricsOpen = None,
    allowed_host: access.AllowedHosts = None,
    cors_origin: access.CorsOrigins = None,
    no_checksums: options.NoChecksums = False,
    config: options.Config = None,
    device: ranks.Device = None,
    tp: ranks.Tp = None,
    virtual_shards: ranks.VirtualShards = None,
    split_pool: ranks.SplitPool = None,
    rank: ranks.Rank = None,
    rendezvous: ranks.Rendezvous = None,
) -> None:
    """Serve a pack over the OpenAI and Anthropic APIs."""
    given = dict(locals())
    (end_by_hangups if rank else heed_hangups)()
    if rank:
        raise_interrupts()
    from twinspark.config.engine import EngineConfig
    from twinspark.config.load import make_settings, read_sources
    from twinspark.config.server import ServerConfig

    sources = read_sources(config)
    drop_secrets()  # before anything starts a process, a rank that follows too
    server_config = make_settings(ServerConfig, "server", sources, _server_flags(given))
    engine_flags = {
        "slots": slots, "max_context_tokens": max_context, "draft": draft, "threads": threads,
        "device": device, "ranks": tp, "virtual_shards": virtual_shards, "split_pool": split_pool,
    }  # fmt: skip
    engine_config = make_settings(EngineConfig, "engine", sources, engine_flags)
    place = ranks.rank_place(rank, rendezvous, engine_config)
    how: dict[str, Any] = {"verify": not no_checksums, "log_level": sources.log_level}
    if ranks.follows(pack, engine_config, place, **how):
        return
    keys = access.open_keys(server_config, sources, api_key_digest or ())
    opened, tokenizer = _open(pack, engine_config, verify=not no_checksums)
    run_server(
        opened, server_config, engine_config, tokenizer=tokenizer, keys=keys,
        rendezvous=rendezvous, **how,
    )  # fmt: skip


def _server_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the server's settings from the command's own arguments."""
    lists = {
        "allowed_hosts": "allowed_host",
        "cors_origins": "cors_origin",
        "model_aliases": "alias",
    }
    same = (
        "host", "port", "model_name", "request_log", "reasoning_fields", "reproducible_seeds",
        "surface_unterminated_reasoning", "api_keys_file", "key_requests", "key_tokens_per_hour",
        "metrics_open",
    )  # fmt: skip
    return {
        **{name: given[name] for name in same},
        **{name: given[flag] and tuple(given[flag]) for name, flag in lists.items()},
        "keepalive_s": given["keepalive"],
        "shutdown_grace_s": given["grace"],
        "sampling": _defaults(given["temperature"]),
    }


def _defaults(temperature: float | None) -> "SamplingDefaults | None":
    from twinspark.config.server import SamplingDefaults

    return None if temperature is None else SamplingDefaults(temperature=temperature)


def _open(pack: Path | None, config: "EngineConfig", *, verify: bool) -> "tuple[Pack, Tokenizer]":
    from twinspark.config.paths import demo_pack_path
    from twinspark.engine.startup import open_tokenizer
    from twinspark.pack.reader import open_pack

    opened = open_pack(demo_pack_path() if pack is None else pack, verify=verify)
    config.context_tokens(opened.config.max_position_embeddings)
    return opened, open_tokenizer(opened)


def run_server(
    pack: "Pack",
    config: "ServerConfig",
    engine_config: "EngineConfig",
    *,
    log_level: str,
    tokenizer: "Tokenizer | None" = None,
    keys: "KeyRing | None" = None,
    verify: bool = True,
    rendezvous: str | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until a stop signal.

    Args:
        pack: a checked pack.
        config: the server's settings.
        engine_config: the engine's.
        log_level: debug, info, warning or error.
        tokenizer: the pack's; None reads it.
        keys: who may come in; None is everybody.
        verify: whether the engine process compares the pack with its manifest too.
        rendezvous: HOST:PORT where ranks started by hand come to.
        on_ready: called once with the server's address; must return at once.

    Raises:
        ConfigError: the address cannot be bound, or a file of the pack cannot be used.
        EngineDied: the engine ended before it was ready.
    """
    set_up_logging(log_level)
    from twinspark.config.paths import pack_name
    from twinspark.text.tokenizer import Tokenizer

    tokenizer = tokenizer or Tokenizer.from_file(pack.tokenizer_path)
    defaults = config.sampling.over(pack.generation_config)
    extra = [] if verify else ["--no-checksums"]
    if rendezvous is not None:
        extra += ["--rendezvous", rendezvous]

    def make_app(link: "EngineLink") -> "Starlette":
        from twinspark.server.app import build_app

        name = config.model_name or pack_name(pack.path)
        return build_app(config, link, tokenizer, model_name=name, defaults=defaults, keys=keys)

    warn_if_open(config, keys)
    listener = bind(config.host, config.port, unread_s=config.unread_s)
    with listener:
        from twinspark.server.link import EngineProcess

        process = EngineProcess(
            lambda fd: [*worker_command(pack.path, engine_config, log_level, fd), *extra]
        )
        end_by_interrupts(process.kill)
        try:
            _serve_http(
                make_app, config, process, listener, on_ready, num_ranks=engine_config.ranks
            )
        finally:
            process.end()


def _serve_http(
    make_app: "Callable[[EngineLink], Starlette]",
    config: "ServerConfig",
    process: "EngineProcess",
    listener: socket.socket,
    on_ready: Callable[[str], None] | None,
    *,
    num_ranks: int,
) -> None:
    from twinspark.cli.lifecycle import ServerLife
    from twinspark.server.link import EngineLink

    url = base_url(listener)
    say(f"listening on {url} (GET /health says when the model is ready)")
    loading = LoadingLine()
    link = EngineLink(process, on_loading=loading.show)
    life = ServerLife(make_app(link), process, listener, loading, num_ranks=num_ranks)
    life.run(link, on_ready=lambda: on_ready(url) if on_ready else None)


def worker_command(pack: Path, engine_config: "EngineConfig", log_level: str, fd: int) -> list[str]:
    """Arguments of the engine process."""
    settings = json.dumps(dataclasses.asdict(engine_config))
    return [
        sys.executable, "-P", "-m", "twinspark", "engine-worker", str(pack),
        "--fd", str(fd), "--parent", str(os.getpid()), "--log-level", log_level,
        "--settings", settings,
    ]  # fmt: skip


def base_url(listener: socket.socket) -> str:
    """The address of a bound socket as clients write it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind(host: str, port: int, *, unread_s: float = 0.0) -> socket.socket:
    """A socket bound to the address, not yet listening for HTTP.

    Args:
        host: a name or an address of this machine.
        port: 0 takes a free one.
        unread_s: the system ends connections whose client takes nothing for so long; 0 never.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:  # ValueError: no host name can be written so
        raise ConfigError(
            f"cannot use the address {host!r}: {error}; give an address of this machine, such as "
            "127.0.0.1, with --host"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if unread_s:  # connections inherit it
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * unread_s))
            )
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port, "
            "0 takes a free one"
        ) from error
    return listener
