"""What a user chooses about the engine: slots, context, pieces, drafting, threads.

Ranges are checked here; what the model allows (its context) is checked where both are known.
Read next: `config/load.py` (where values come from), `engine/core.py` (who uses them).
"""

import re
from dataclasses import dataclass
from typing import Literal

from twinspark.errors import ConfigError

CPU_PREFILL_CHUNK = 128
CUDA_PREFILL_CHUNK = 4096
"""A GPU reads nearly all weights for 64 rows already; beside replies pieces are cut by layers."""

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")

CacheFormat = Literal["packed", "bf16"]

MAX_WINDOW_ROWS = 16
DEFAULT_CONTEXT_TOKENS = 32768


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine: when and how fast replies come.

    Only `mask_reserved` and `virtual_shards` change what a reply is.

    Memory settings are in bytes; 0 switches a rule off.

    Attributes:
        device: "cpu", "cuda", "cuda:N", or "auto": a CUDA device if there is one to use. Several
            ranks that run here take as many devices, from this one on.
        slots: requests that run at the same time.
        max_context_tokens: longest prompt plus reply of a request; None is the least of the
            model's own limit, DEFAULT_CONTEXT_TOKENS and what the pool holds.
        prefill_chunk: most prompt tokens that run at a time, all requests together; None is
            CPU_PREFILL_CHUNK, or CUDA_PREFILL_CHUNK on a device.
        max_window_rows: most rows one request decodes in a round: 1 plus its drafts.
        draft: whether replies are drafted at all, by the draft blocks or by copying.
        draft_tokens: drafts a round and request at most; None lets the prices decide alone.
        priced_drafts: choose depths by expected tokens against measured cost; False always
            drafts `draft_tokens`, or the whole block.
        lookup: also draft by copying from the request's own text, priced the same way.
        queue_size: requests that may wait for a slot; more are refused.
        mask_reserved: reserved and placeholder ids of the tokenizer are never chosen.
        threads: CPU threads of a forward pass; None is 1 for small models, else torch's default.
        virtual_shards: how row-split sums are cut; another value is another build.
        ranks: processes the model is spread over; divides virtual_shards.
        rank_timeout_s: a rank that is silent for this long counts as dead.
        split_pool: every rank keeps its own part of the pages (design decision 25).
        page_tokens: positions a page (design decision 22).
        pool_tokens: positions of the shared pool, rounded down to whole pages; None is every slot's
            whole context and one more for saved prefixes.
        pages_from_top: take pages from the end of the pool first, a debugging aid.
        cache_format: "packed" bytes as trained, or the same values as "bf16".
        prefix_reuse: keep prefixes of finished work for later requests.
        checkpoint_bytes: memory for resume points.
        checkpoint_spacing: prompt positions between encoder checkpoints (design decision 24).
        index_scratch_bytes: memory for index scores of one step; never changes a score.
        memory_target_bytes: usable memory that admission leaves on every rank.
        memory_floor_bytes: usable memory under which nothing is admitted at all.
        long_prompt_tokens: of prompts with more than this left to run, one runs at a time.
        capacity_wait_s: how long a request waits for memory before it is refused.
        fair_share: part of the time that running replies keep while a prompt is run.
    """

    device: str = "auto"
    slots: int = 4
    max_context_tokens: int | None = None
    prefill_chunk: int | None = None
    max_window_rows: int = MAX_WINDOW_ROWS
    draft: bool = True
    draft_tokens: int | None = None
    queue_size: int = 64
    mask_reserved: bool = True
    threads: int | None = None
    virtual_shards: int = 2
    priced_drafts: bool = True
    lookup: bool = True
    ranks: int = 1
    rank_timeout_s: float = 2.0
    split_pool: bool = False
    page_tokens: int = 256
    pool_tokens: int | None = None
    pages_from_top: bool = False
    cache_format: CacheFormat = "packed"
    prefix_reuse: bool = True
    checkpoint_bytes: int = 256 << 20
    checkpoint_spacing: int = 4096
    index_scratch_bytes: int = 64 << 20
    memory_target_bytes: int = 0
    memory_floor_bytes: int = 0
    long_prompt_tokens: int = 32768
    capacity_wait_s: float = 30.0
    fair_share: float = 0.5

    @property
    def prompt_rows(self) -> int:
        """`prefill_chunk`, or what suits the device."""
        if self.prefill_chunk is not None:
            return self.prefill_chunk
        return CUDA_PREFILL_CHUNK if self.device.startswith("cuda") else CPU_PREFILL_CHUNK

    def __post_init__(self) -> None:
        for name, low, high in (
            ("slots", 1, 256),
            ("max_window_rows", 1, MAX_WINDOW_ROWS),
            ("queue_size", 0, 1_000_000),
            ("page_tokens", 2, 4096),
            ("checkpoint_bytes", 0, 1 << 50),
            ("checkpoint_spacing", 1, 1 << 30),
            ("index_scratch_bytes", 1 << 16, 1 << 40),
            ("memory_target_bytes", 0, 1 << 50),
            ("memory_floor_bytes", 0, 1 << 50),
            ("long_prompt_tokens", 1, 1 << 30),
        ):
            _check_int(name, getattr(self, name), low, high)
        for name, low, high in (
            ("max_context_tokens", 2, 1 << 30),
            ("prefill_chunk", 1, 65536),
            ("draft_tokens", 1, MAX_WINDOW_ROWS - 1),
            ("threads", 1, 1024),
            ("pool_tokens", 2, 1 << 40),
        ):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low, high)
        _check_float("rank_timeout_s", self.rank_timeout_s, 0.1, 3600.0)
        _check_float("capacity_wait_s", self.capacity_wait_s, 0.0, 86400.0)
        _check_float("fair_share", self.fair_share, 0.0, 0.95)
        self._check_shape()

    def _check_shape(self) -> None:
        if not (isinstance(self.device, str) and _DEVICE.fullmatch(self.device)):
            raise ConfigError(
                f'device is {self.device!r}, expected "auto", "cpu", "cuda" or "cuda:N"'
            )
        if self.virtual_shards not in (2, 4):
            raise ConfigError(f"virtual_shards is {self.virtual_shards!r}, expected 2 or 4")
        if self.ranks not in (1, 2, 4) or self.virtual_shards % self.ranks:
            raise ConfigError(
                f"ranks is {self.ranks!r} with virtual_shards {self.virtual_shards}; expected 1, 2 "
                "or 4, dividing virtual_shards"
            )
        if self.device.startswith("cuda") and self.split_pool:
            raise ConfigError(
                f"device is {self.device!r} with split_pool; a split pool runs on CPUs only so "
                "far: leave one of the two out"
            )
        if self.split_pool and self.ranks == 1:
            raise ConfigError("split_pool has no effect with one rank; give ranks too")
        if self.pool_tokens is not None and self.pool_tokens < self.page_tokens:
            raise ConfigError(
                f"pool_tokens is {self.pool_tokens}, less than one page of {self.page_tokens}; "
                "give more, or smaller pages"
            )
        if self.page_tokens % 2:
            raise ConfigError(f"page_tokens is {self.page_tokens}, expected an even number")
        if self.cache_format not in ("packed", "bf16"):
            raise ConfigError(f'cache_format is {self.cache_format!r}, expected "packed" or "bf16"')
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
            most = min(model_limit, DEFAULT_CONTEXT_TOKENS)
            if self.pool_tokens is not None:
                most = min(most, self.pool_tokens // self.page_tokens * self.page_tokens)
            return most
        if self.max_context_tokens > model_limit:
            raise ConfigError(
                f"max_context_tokens is {self.max_context_tokens}, but the model's positions end "
                f"at {model_limit}; ask for {model_limit} or less"
            )
        return self.max_context_tokens


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is {value!r}, expected a number, {low:g} to {high:g}")
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}, expected {low:g} to {high:g}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}, expected an integer, {low} to {high}")
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}, expected {low} to {high}")
