"""Runs real clients against the server over a scripted engine, each in an environment of its own.

    python -m tests.clients.run            all of them
    python -m tests.clients.run NAME ...   some of them

Environments are made under build/clients/ at the first run and kept; PyPI and npm are needed for
that only. One line a client; the exit status is 1 if one failed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.brain import MADE_FILE, MADE_TEXT, Brain
from tests.live_server import serve_in_thread
from tests.scripted_engine import ScriptedEngine

import twinspark
from twinspark.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
BUILD = HERE.parent.parent / "build" / "clients"
TIMEOUT_S = 300
DEMO_TOKENIZER = Path(twinspark.__file__).parent / "demo" / "pack" / "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client and what it must have done.

    Attributes:
        name: of its folder under build/clients/.
        packages: what its environment holds.
        script: in this folder; `.py` and `.mjs` run as they are, `.sh` with bash.
        num_calls: tool calls that it has to have run at least.
        makes_file: whether a call of its makes a file in its working folder.
    """

    name: str
    packages: tuple[str, ...]
    script: str
    num_calls: int = 0
    makes_file: bool = False


CLIENTS = (
    Client(name="litellm", packages=("litellm",), script="use_litellm.py", num_calls=1),
    Client(
        name="langchain", packages=("langchain-openai",), script="use_langchain.py", num_calls=1
    ),
    Client(name="llm", packages=("llm",), script="use_llm.sh"),
    Client(name="lm-eval", packages=("lm-eval[api]", "transformers"), script="use_lm_eval.py"),
    Client(
        name="ai-sdk",
        packages=("ai", "@ai-sdk/openai-compatible", "zod"),
        script="use_ai_sdk.mjs",
        num_calls=1,
    ),
    Client(
        name="opencode",
        packages=("opencode-ai",),
        script="use_opencode.sh",
        num_calls=1,
        makes_file=True,
    ),
    Client(
        name="codex",
        packages=("@openai/codex",),
        script="use_codex.sh",
        num_calls=1,
        makes_file=True,
    ),
)


def main(names: Sequence[str]) -> int:
    known = {client.name: client for client in CLIENTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return 2
    faults = [name for name in names or known if not run(known[name])]
    print(f"{len(names or known) - len(faults)} passed, {len(faults)} failed")
    return 1 if faults else 0


def run(client: Client) -> bool:
    """Set a client up, run it, and judge it; what it printed is shown if it failed."""
    started = time.monotonic()
    try:
        folder = set_up(client)
    except subprocess.CalledProcessError as error:
        print(f"{client.name}: cannot be installed\n{(error.stdout or '')[-2000:]}")
        return False
    tokenizer = Tokenizer.from_file(DEMO_TOKENIZER)
    engine = ScriptedEngine(tokenizer, num_slots=16, context=1 << 20)
    brain = Brain(engine)
    with (
        serve_in_thread(engine, tokenizer) as live,
        tempfile.TemporaryDirectory(prefix="twinspark-client-") as work,
    ):
        done = _start(client, folder, Path(work), live.url)
        made = Path(work) / MADE_FILE
        fault = _fault_of(client, done, brain, made.read_text() if made.exists() else None)
    seconds = time.monotonic() - started
    print(f"{client.name}: {fault or 'ok'} ({seconds:.0f} s, {len(engine.requests)} requests)")
    if fault:
        print(done.stdout[-6000:])
    return not fault


def set_up(client: Client) -> Path:
    """Make the environment unless it is there; `.done` is written last."""
    folder = BUILD / client.name
    mark = folder / ".done"
    if mark.exists() and mark.read_text() == " ".join(client.packages):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if is_node(client):
        steps = [["npm", "install", "--no-fund", "--no-audit", *client.packages]]
    else:
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
        constraints = str(BUILD.parent.parent / "constraints-cpu.txt")
        steps = [
            [sys.executable, "-m", "venv", str(folder)],
            [*pip, "-c", constraints, *client.packages],
        ]
    for step in steps:
        subprocess.run(
            step, cwd=folder, check=True, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    mark.write_text(" ".join(client.packages))
    return folder


def is_node(client: Client) -> bool:
    """Whether its packages come from npm."""
    return client.name in ("ai-sdk", "opencode", "codex")


def _start(
    client: Client, folder: Path, work: Path, url: str
) -> "subprocess.CompletedProcess[str]":
    script = HERE / client.script
    runner = {".py": str(folder / "bin" / "python"), ".mjs": "node", ".sh": "bash"}[script.suffix]
    if script.suffix == ".mjs":  # modules are looked for beside the script
        script = Path(shutil.copy(script, folder))
    environment = {
        "PATH": f"{folder / 'bin'}:{folder / 'node_modules' / '.bin'}:{os.environ['PATH']}",
        "HOME": str(work), "BASE_URL": f"{url}/v1", "CLIENT_WORK": str(work), "LANG": "C.UTF-8",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "XDG_CACHE_HOME": str(work / ".cache"), "DEMO_TOKENIZER": str(DEMO_TOKENIZER),
        "DO_NOT_TRACK": "1",
    }  # fmt: skip
    try:
        return subprocess.run(
            [runner, str(script)], cwd=work, env=environment, text=True, timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return subprocess.CompletedProcess([], 124, said)


def _fault_of(
    client: Client, done: "subprocess.CompletedProcess[str]", brain: Brain, made: str | None
) -> str:
    if done.returncode:
        return f"exit status {done.returncode}"
    if brain.num_calls < client.num_calls:
        return f"{brain.num_calls} tool calls, expected {client.num_calls} or more"
    if client.num_calls and not brain.num_results:
        return "no result of a tool came back"
    if client.makes_file and made != MADE_TEXT:
        return f"the call's file holds {made!r}, expected {MADE_TEXT!r}"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
