"""The engine process on the fake model. Run as `python host_child.py FD MODE`."""

import logging
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.fake_model import FakeModel
from tests.small_tokenizer import small_tokenizer_json

from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.engine.host import run_host
from twinspark.engine.startup import LoadedEngine
from twinspark.errors import FormatError
from twinspark.text.tokenizer import Tokenizer


class SlowModel(FakeModel):
    def forward(self, step, caches):
        time.sleep(0.005)
        return super().forward(step, caches)


def load(mode, report):
    report("weights", 0.5)
    if mode == "bad-pack":
        raise FormatError("the pack is bad")
    if mode == "slow-load":
        for _ in range(400):
            time.sleep(0.05)
            report("weights", 0.5)
    model = SlowModel(context=100_000)
    model.broken_after = 5 if mode == "breaks" else None
    tokenizer = Tokenizer(small_tokenizer_json())
    config = EngineConfig(slots=2, queue_size=2, max_context_tokens=50_000)
    engine = Engine(model, tokenizer, config)
    return LoadedEngine(engine=engine, tokenizer=tokenizer, model_name="fake", load_seconds=0.1)


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    mode = sys.argv[2]
    run_host(socket.socket(fileno=int(sys.argv[1])), lambda report: load(mode, report))
