"""A stand-in for the engine process: speaks the wire, plays the babble of `fake_engine.py`.

Run as `python child_engine.py FD TOKENIZER [MODE]`. Modes: "well", "slow" (10 ms a round), "dies"
(exit 3 after the second round), "never-ready" (exit 1 while loading), "unusable" (exit 2 while
loading), "unusable-late" and "ranks-late" (exit 2 and 70 a good while after the link was closed),
"queue" (news of the queue and scores of the prompt before each reply).
"""

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fake_engine import FakeEngine

from twinspark.messages import (
    Admitted,
    Cancel,
    FrameReader,
    GenerateRequest,
    Loading,
    PromptScores,
    ReplyEvent,
    Shutdown,
    TokenDelta,
    TokenScore,
    Waiting,
    pack_message,
)
from twinspark.text.tokenizer import Tokenizer


def news(name: str) -> list[ReplyEvent]:
    scores = (TokenScore(token_id=6, logprob=-0.5, top=((7, -0.25),)),)
    return [
        Waiting(request_id=name, position=1, cause="pool", predicted_ms=2.5),
        Admitted(request_id=name, cached_tokens=1),
        PromptScores(request_id=name, first=1, scores=scores),
    ]


NEVER_READY = {
    "never-ready": ("the pack is haunted", 1, 0.0),
    "unusable": ("the device is haunted", 2, 0.0),
    "unusable-late": ("the device is haunted", 2, 2.5),
    "ranks-late": ("rank 1 is haunted", 70, 2.5),
}


async def fail(writer: asyncio.StreamWriter, mode: str) -> NoReturn:
    said, code, late_s = NEVER_READY[mode]
    print(said, file=sys.stderr, flush=True)
    if late_s:
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(late_s)
    sys.exit(code)


async def main(fd: int, tokenizer: str, mode: str) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    writer.write(pack_message(Loading(phase="weights", fraction=0.5)))
    if mode in NEVER_READY:
        await fail(writer, mode)
    engine = FakeEngine(Tokenizer.from_file(tokenizer))
    engine.round_s = 0.01 if mode == "slow" else 0.0
    if mode == "slow":
        engine.script = lambda request: ([300 + i % 50] for i in range(10**6))
    assert engine.ready is not None
    writer.write(pack_message(engine.ready))
    frames = FrameReader()
    tasks: dict[str, asyncio.Task[None]] = {}

    async def run(request: GenerateRequest) -> None:
        num_rounds = 0
        for event in news(request.request_id) if mode == "queue" else ():
            writer.write(pack_message(event))
        async for event in engine.generate(request):
            writer.write(pack_message(event))
            num_rounds += isinstance(event, TokenDelta)
            if mode == "dies" and num_rounds == 2:
                await writer.drain()
                print("out of luck", file=sys.stderr, flush=True)
                os._exit(3)

    while data := await reader.read(65536):
        for message in frames.feed(data):
            if isinstance(message, GenerateRequest):
                tasks[message.request_id] = asyncio.create_task(run(message))
            elif isinstance(message, Cancel) and message.request_id in tasks:
                tasks[message.request_id].cancel()
                print(f"cancelled {message.request_id}", file=sys.stderr, flush=True)
            elif isinstance(message, Shutdown):
                return


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], *(sys.argv[3:] or ["well"])))
