"""What a user chooses about the engine: slots, context, pieces, drafting, threads.

Ranges are checked here; what the model allows (its context) is checked where both are known.
Read next: `config/load.py` (where values come from), `engine/core.py` (who uses them).
"""

from dataclasses import dataclass

from twinspark.errors import ConfigError

MAX_WINDOW_ROWS = 16
DEFAULT_CONTEXT_TOKENS = 32768


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine: when and how fast replies come.

    Only `mask_reserved` and `virtual_shards` change what a reply is.

    Attributes:
        slots: requests that run at the same time.
        max_context_tokens: longest prompt plus reply of a request; None is the model's own limit
            or DEFAULT_CONTEXT_TOKENS, whichever is less.
        prefill_chunk: most prompt tokens of one round, all requests together.
        max_window_rows: most rows one request decodes in a round: 1 plus its drafts.
        draft: whether the model's draft blocks are used at all.
        draft_tokens: drafts a round and request; None is the model's whole block.
        queue_size: requests that may wait for a slot; more are refused.
        mask_reserved: reserved and placeholder ids of the tokenizer are never chosen.
        threads: CPU threads of a forward pass; None is 1 for small models, else torch's default.
        virtual_shards: how row-split sums are cut; another value is another build.
    """

    slots: int = 4
    max_context_tokens: int | None = None
    prefill_chunk: int = 128
    max_window_rows: int = MAX_WINDOW_ROWS
    draft: bool = True
    draft_tokens: int | None = None
    queue_size: int = 64
    mask_reserved: bool = True
    threads: int | None = None
    virtual_shards: int = 2

    def __post_init__(self) -> None:
        for name, low, high in (
            ("slots", 1, 256),
            ("prefill_chunk", 1, 65536),
            ("max_window_rows", 1, MAX_WINDOW_ROWS),
            ("queue_size", 0, 1_000_000),
        ):
            _check_int(name, getattr(self, name), low, high)
        for name, low, high in (
            ("max_context_tokens", 2, 1 << 30),
            ("draft_tokens", 1, MAX_WINDOW_ROWS - 1),
            ("threads", 1, 1024),
        ):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low, high)
        if self.virtual_shards not in (2, 4):
            raise ConfigError(f"virtual_shards is {self.virtual_shards!r}, expected 2 or 4")
        if self.draft_tokens is not None and not self.draft:
            raise ConfigError(
                "draft_tokens has no effect with draft = false; give only one of them"
            )

    def context_tokens(self, model_limit: int) -> int:
        """The context of a request on a model whose positions end at `model_limit`.

        Raises:
            ConfigError: max_context_tokens asks for more than the model has.
        """
        if self.max_context_tokens is None:
            return min(model_limit, DEFAULT_CONTEXT_TOKENS)
        if self.max_context_tokens > model_limit:
            raise ConfigError(
                f"max_context_tokens is {self.max_context_tokens}, but the model's positions end "
                f"at {model_limit}; ask for {model_limit} or less"
            )
        return self.max_context_tokens


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}, expected an integer, {low} to {high}")
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}, expected {low} to {high}")
