"""The process that tries grammars before a request may carry them into the engine.

Each one in a fork of its own, with little memory, a small stack and little time: a grammar that
kills its compiler kills nothing else. Talks to `grammar_check.py`: length-prefixed JSON in and out.
"""

import json
import os
import resource
import select
import signal
import struct
import sys
import threading
from time import monotonic
from typing import Any, BinaryIO

from twinspark.errors import RequestError
from twinspark.text.grammar_library import library_matcher, unchecked_tokenizer, walk

LENGTH = struct.Struct("<I")
MAX_SECONDS = 3.0
MAX_MORE_BYTES = 1 << 30  # address space that a compilation may add
STACK_BYTES = 2 << 20  # an engine's threads have four times as much
TOO_SLOW = f"it takes more than {MAX_SECONDS:g} s to compile"
TOO_DEEP = "it is too large or too deeply nested to compile"


def main() -> None:
    """Serve until the parent closes the pipe."""
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = _read(inbox)
    if start is None:
        return
    tokenizer = unchecked_tokenizer(start["tokenizer"], start["vocab_size"], start["eos_id"])
    while (job := _read(inbox)) is not None:
        answer = json.dumps({"error": check(tokenizer, job["grammar"])}).encode()
        outbox.write(LENGTH.pack(len(answer)) + answer)
        outbox.flush()


def check(tokenizer: Any, grammar: str) -> str:
    """What is wrong with a grammar; empty if nothing is."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            _compile_apart(tokenizer, grammar, writer)
        finally:
            os._exit(0)
    os.close(writer)
    try:
        verdict = _verdict(reader)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return verdict


def _verdict(reader: int) -> str:
    deadline_s = monotonic() + MAX_SECONDS
    data = b""
    while True:
        left_s = deadline_s - monotonic()
        if left_s <= 0 or not select.select([reader], [], [], left_s)[0]:
            return TOO_SLOW
        part = os.read(reader, 1 << 16)
        if not part:
            return str(json.loads(data)) if data else TOO_DEEP
        data += part


def _compile_apart(tokenizer: Any, grammar: str, writer: int) -> None:
    """In the fork: compile in a thread with a small stack, and write the verdict."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + MAX_MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library writes its panics there

    def compile_it() -> None:
        verdict = ""
        try:
            walk(library_matcher(tokenizer, grammar))
        except RequestError as error:
            verdict = str(error)
        except BaseException:  # a panic of the library
            verdict = TOO_DEEP
        os.write(writer, json.dumps(verdict).encode())

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=compile_it)
    thread.start()
    thread.join()


def _read(file: BinaryIO) -> Any:
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = file.read(length)
    return json.loads(body) if len(body) == length else None


if __name__ == "__main__":
    main()
