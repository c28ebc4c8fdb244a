"""What the routes share: settings, engine, tokenizer, and the replies that are open."""

import time
from dataclasses import dataclass, field

from twinspark.config.server import ServerConfig
from twinspark.messages import EngineClient, Ready, Sampling
from twinspark.server.errors import LOADING_RETRY_S, draining, engine_gone, unavailable
from twinspark.server.workers import Workers
from twinspark.text.tokenizer import Tokenizer


@dataclass(kw_only=True)
class ServerState:
    """One server.

    Attributes:
        config: its settings.
        model_name: what replies and the model list carry.
        defaults: numbers of requests that leave them out.
        engine: where requests run.
        tokenizer: the pack's own.
        started_at: seconds since 1970.
        open_replies: ids of replies under way; only routes change it.
        num_replies: all replies begun.
        is_draining: no new work; only `cli/serve.py` sets it.
        workers: where long prompts are encoded.
    """

    config: ServerConfig
    model_name: str
    defaults: Sampling
    engine: EngineClient
    tokenizer: Tokenizer
    started_at: float = field(default_factory=time.time)
    open_replies: set[str] = field(default_factory=set)
    num_replies: int = 0
    is_draining: bool = False
    workers: Workers = field(default_factory=Workers)

    def require_ready(self) -> Ready:
        """What the engine said when it became ready.

        Raises:
            ApiError: 503 that says why no work is taken now.
        """
        if self.engine.failure is not None:
            raise engine_gone(self.engine.failure)
        if self.is_draining:
            raise draining()
        ready = self.engine.ready
        if ready is None:
            loading = self.engine.loading
            progress = f"{loading.phase}, {loading.fraction:.0%}" if loading else "starting"
            raise unavailable(
                f"the model is loading ({progress}); try again shortly",
                code="loading",
                retry_s=LOADING_RETRY_S,
            )
        return ready
