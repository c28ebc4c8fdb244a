"""`twinspark chat`: a conversation in the terminal, or one question with --once.

The reply goes to stdout and nothing else does with --once; notes, reasoning and figures go to
stderr. Ctrl-C stops the reply and not the program, Ctrl-D ends it. Read next: `llm.py`.
"""

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinspark.cli import ranks
from twinspark.cli.console import LoadingLine, say
from twinspark.cli.exits import EXIT_INTERRUPTED
from twinspark.cli.logs import set_up_logging
from twinspark.errors import RequestError
from twinspark.messages import Loading, ReplyStats, Sampling

if TYPE_CHECKING:
    from twinspark.config.engine import EngineConfig
    from twinspark.llm import LLM, Reply

HELP = """\
/reset             forget the conversation
/think on|off      let replies start with a thinking block, or not
/seed N|off        the same seed gives the same reply; off draws a new one each time
/temperature X     0 is greedy
/max-tokens N|off  longest reply
/help              this text; Ctrl-C stops a reply, Ctrl-D ends the program"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("chat")(chat)


def chat(
    pack: Annotated[
        Path | None, typer.Argument(help="Folder of the pack. Default: the demo pack.")
    ] = None,
    once: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Answer TEXT on stdout and end.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same reply.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy [the pack's].")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest reply, in tokens.")] = None,
    think: Annotated[
        bool | None, typer.Option("--think/--no-think", help="Start with a thinking block.")
    ] = None,
    draft: Annotated[
        bool | None, typer.Option("--draft/--no-draft", help="Use the draft blocks [on].")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Longest conversation, in tokens.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    no_checksums: Annotated[
        bool, typer.Option("--no-checksums", help="Skip the pack's manifest.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
    device: ranks.Device = None,
    tp: ranks.Tp = None,
    virtual_shards: ranks.VirtualShards = None,
    split_pool: ranks.SplitPool = None,
    rank: ranks.Rank = None,
    rendezvous: ranks.Rendezvous = None,
) -> None:
    """Chat with a pack in the terminal."""
    from twinspark.config.engine import EngineConfig
    from twinspark.config.load import make_settings, read_sources
    from twinspark.engine.checks import check_sampling

    sources = read_sources(config)
    level = sources.log_level if "TWINSPARK_LOG_LEVEL" in sources.env else "warning"
    flags = {
        "draft": draft, "max_context_tokens": max_context, "threads": threads,
        "device": device, "ranks": tp, "virtual_shards": virtual_shards, "split_pool": split_pool,
    }  # fmt: skip
    settings = replace(make_settings(EngineConfig, "engine", sources, flags), slots=1)
    place = ranks.rank_place(rank, rendezvous, settings)
    if ranks.follows(pack, settings, place, verify=not no_checksums, log_level=level):
        return
    set_up_logging(level)
    given: dict[str, Any] = {"seed": seed, "temperature": temperature, "max_tokens": max_tokens}
    given = {name: value for name, value in given.items() if value is not None}
    check_sampling(Sampling(**given))
    loading = LoadingLine(only_terminal=once is not None)
    with _load(pack, settings, place, loading, verify=not no_checksums) as llm:
        session = ChatSession(llm, replace(llm.default_sampling, **given), thinking=think)
        if once is None:
            run_terminal(session)
        else:
            answer_once(session, once)


def _load(
    pack: Path | None,
    config: "EngineConfig",
    place: ranks.RankPlace,
    loading: LoadingLine,
    *,
    verify: bool,
) -> "LLM":
    from twinspark.llm import LLM

    try:
        return LLM(
            pack,
            config=config,
            on_progress=lambda phase, done: loading.show(Loading(phase=phase, fraction=done)),
            verify=verify,
            rendezvous=place.address,
        )
    finally:
        loading.close()


def answer_once(session: "ChatSession", text: str) -> None:
    """Answer one question; the reply and a line feed go to stdout."""
    reply = session.ask(text)
    say(describe(reply.stats))
    if reply.finish_reason == "cancelled":
        raise typer.Exit(EXIT_INTERRUPTED)


def run_terminal(session: "ChatSession") -> None:
    """Read lines until Ctrl-D; each is a command or a question."""
    with suppress(ImportError):
        import readline  # noqa: F401  (input() then has editing and history)

    say(f"{session.llm.model_name} is ready. /help lists commands, Ctrl-D ends.")
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            print()
            say("Ctrl-D ends the program")
            continue
        except EOFError:
            print()
            return
        if not line:
            continue
        try:
            if line.startswith("/"):
                say(session.command(line))
            else:
                say(describe(session.ask(line).stats))
        except RequestError as error:
            is_full = error.code == "context_length_exceeded"
            say(f"{error}; /reset forgets the conversation" if is_full else str(error))


@dataclass
class ChatSession:
    """A conversation so far, and how to go on.

    Attributes:
        llm: the model.
        sampling: how replies are chosen.
        thinking: whether replies start with a thinking block; None is the default.
        messages: what was said.
    """

    llm: "LLM"
    sampling: Sampling
    thinking: bool | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> "Reply":
        """Add a question, write the reply as it comes; Ctrl-C ends the reply early.

        Raises:
            RequestError: the conversation is too long, or a number is out of range; the
                conversation is as before.
        """
        question = {"role": "user", "content": text}
        stream = self.llm.chat_stream(
            [*self.messages, question], self.sampling, thinking=self.thinking
        )
        writer = _Writer()
        with _OnInterrupt(stream.cancel):
            for piece in stream:
                writer.write(piece.reasoning, piece.content)
        writer.close()
        reply = stream.reply
        self.messages += [question, {"role": "assistant", "content": reply.text}]
        return reply

    def command(self, line: str) -> str:
        """Obey a line that starts with a slash; gives what to tell the user."""
        name, _, value = line[1:].partition(" ")
        value = value.strip()
        try:
            match name:
                case "help":
                    return f"commands:\n{HELP}"
                case "reset":
                    self.messages.clear()
                    return "the conversation is forgotten"
                case "think":
                    self.thinking = {"on": True, "off": False}[value]
                    return f"thinking is {value}"
                case "seed":
                    return self._set("seed", None if value == "off" else int(value))
                case "temperature":
                    return self._set("temperature", float(value))
                case "max-tokens":
                    return self._set("max_tokens", None if value == "off" else int(value))
        except RequestError as error:
            return f"/{name}: {error}"
        except (ValueError, KeyError):
            return f"/{name} does not take {value!r}; /help says what it takes"
        return f"no command /{name}; /help lists them"

    def _set(self, name: str, value: Any) -> str:
        from twinspark.engine.checks import check_sampling

        changed = replace(self.sampling, **{name: value})
        check_sampling(changed)
        self.sampling = changed
        return f"{name} is {'off' if value is None else value}"


def describe(stats: ReplyStats) -> str:
    """One line of figures."""
    seconds = (stats.prefill_ms + stats.decode_ms) / 1e3
    speed = stats.completion_tokens / seconds if seconds else 0.0
    kept = stats.accepted / stats.rounds if stats.rounds else 0.0
    return (
        f"{stats.completion_tokens} tokens in {seconds:.1f} s, {speed:.1f} tokens/s, "
        f"{kept:.2f} drafts kept a round, seed {stats.seed}"
    )


class _Writer:
    """Content to stdout; reasoning to stderr, dimmed on a terminal."""

    def __init__(self) -> None:
        self._dim = sys.stderr.isatty()
        self._thinking = False

    def write(self, reasoning: str, content: str) -> None:
        if reasoning:
            start = "\x1b[2m" if self._dim and not self._thinking else ""
            self._thinking = True
            print(start + reasoning, end="", file=sys.stderr, flush=True)
        if content:
            self._end_thinking()
            print(content, end="", flush=True)

    def close(self) -> None:
        self._end_thinking()
        print(flush=True)

    def _end_thinking(self) -> None:
        if self._thinking:
            print("\x1b[0m" if self._dim else "", file=sys.stderr, flush=True)
            self._thinking = False


class _OnInterrupt:
    """While open, Ctrl-C calls a function instead of raising."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._handle)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._action()
