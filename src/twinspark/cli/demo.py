"""`twinspark demo`: serves the demo pack, asks it one question over HTTP, and keeps serving.

What `make demo` runs. The question goes through the real openai client, as a user's would.
"""

import sys
import time
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinspark.cli import ranks
from twinspark.errors import ConfigError

if TYPE_CHECKING:
    from openai import OpenAI

QUESTION = "Write a Python function that reverses a string."
SEED = 7
MAX_TOKENS = 200

NEXT_STEPS = """
The server keeps running; Ctrl-C ends it. To try next, in another terminal:

curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{"model": "demo",
  "messages": [{{"role": "user", "content": "What is the capital of France?"}}], "stream": true}}'

{program} chat
{program} chat --once "What is a river?" --seed 7

{python} - <<'END'
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
reply = client.chat.completions.create(
    model="demo", messages=[{{"role": "user", "content": "Who are you?"}}])
print(reply.choices[0].message.content)
END

In Python without a server:  from twinspark import LLM; llm = LLM.demo()
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    port: Annotated[int, typer.Option(help="Port of the server.", min=1, max=65535)] = 8000,
    question: Annotated[str, typer.Option(help="What to ask.")] = QUESTION,
    device: ranks.Device = None,
) -> None:
    """Serve the demo pack, ask it a question, and keep serving until Ctrl-C."""
    if find_spec("openai") is None:
        raise ConfigError(
            "the demo asks with the openai client, which is not installed; "
            f"run: {sys.executable} -m pip install 'twinspark[demo]'"
        )
    from twinspark.cli.serve import bind, run_server
    from twinspark.config.engine import EngineConfig
    from twinspark.config.paths import demo_pack_path
    from twinspark.config.server import ServerConfig
    from twinspark.pack.reader import open_pack

    config = ServerConfig(port=port, model_name="demo")
    try:
        bind(config.host, port).close()
    except ConfigError as error:
        raise ConfigError(f"{error}; with make: make demo PORT={port % 65535 + 1}") from error
    run_server(
        open_pack(demo_pack_path()),
        config,
        EngineConfig(device=device or "auto"),
        log_level="warning",
        on_ready=lambda url: Thread(target=show, args=(url, question), daemon=True).start(),
    )


def show(url: str, question: str) -> None:
    """Ask the running server, then say what to try next."""
    from openai import OpenAI, OpenAIError

    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        try:
            ask(client, question)
        except OpenAIError as error:
            print(f"\nthe question was not answered: {error}", flush=True)
            return
    print(NEXT_STEPS.format(url=url, program=sys.argv[0], python=sys.executable), flush=True)


def ask(client: "OpenAI", question: str) -> None:
    """Ask, and print the answer as it comes, then its figures."""
    print(f"\n> {question}\n", flush=True)
    begin = time.monotonic()
    chunks = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": question}],
        seed=SEED,
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    stats: dict[str, Any] = {}
    is_thinking = False
    for chunk in chunks:
        stats = getattr(chunk, "stats", None) or stats
        for choice in chunk.choices:
            reasoning = getattr(choice.delta, "reasoning_content", None)
            if reasoning:
                print(("" if is_thinking else "[thinking] ") + reasoning, end="", flush=True)
                is_thinking = True
            if choice.delta.content:
                gap = "\n\n" if is_thinking else ""
                print(gap + choice.delta.content, end="", flush=True)
                is_thinking = False
    print(f"\n\n[{figures(stats, time.monotonic() - begin)}]", flush=True)


def figures(stats: dict[str, Any], total_s: float) -> str:
    """One line of statistics of a reply."""
    if not stats:
        return f"{total_s:.1f} s"
    num_tokens, rounds = stats["completion_tokens"], max(stats["rounds"], 1)
    decode_s = max(stats["decode_ms"] / 1000, 1e-9)
    return (
        f"{num_tokens} tokens in {total_s:.1f} s, first after {stats['first_token_ms']:.0f} ms, "
        f"then {stats['decode_tokens'] / decode_s:.0f} tokens/s; {stats['rounds']} rounds, "
        f"{stats['accepted'] / rounds:.1f} of {stats['drafted'] / rounds:.1f} drafts accepted a "
        f"round; seed {stats['seed']}"
    )
