"""`twinspark serve` over `child_engine.py`: the real process life without torch or a pack.

Run as `python stand_in_serve.py TOKENIZER MODE [GRACE_S [HOST [STALL_S]]]`.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

from twinspark.cli import main, serve
from twinspark.config.engine import EngineConfig
from twinspark.config.server import ServerConfig

if __name__ == "__main__":
    tokenizer, mode, grace_s = sys.argv[1], sys.argv[2], float((sys.argv[3:] or ["5"])[0])
    child = str(Path(__file__).with_name("child_engine.py"))
    serve.worker_command = lambda pack, engine, level, fd: [
        sys.executable, child, str(fd), tokenizer, mode,
    ]  # fmt: skip
    pack = SimpleNamespace(path=Path("tiny"), tokenizer_path=tokenizer, generation_config={})
    host = (sys.argv[4:] or ["127.0.0.1"])[0]
    stall_s = float((sys.argv[5:] or ["30"])[0])
    config = ServerConfig(
        host=host, port=0, shutdown_grace_s=grace_s, stall_s=stall_s, give_up_s=4 * stall_s
    )
    main.run(lambda: serve.run_server(pack, config, EngineConfig(), log_level="info"))
