"""Puts a scheduler together from settings, the model's config and its caches.

The only place that knows all parts of admission by name. Read next: `scheduler.py`, `core.py`.
"""

from time import perf_counter

from twinspark.cache.prefix import PrefixIndex
from twinspark.config.engine import CPU_PREFILL_CHUNK, EngineConfig
from twinspark.config.model import ModelConfig
from twinspark.engine.checkpoints import MarkRules
from twinspark.engine.memory import LocalMemory, MemoryMeter, MemoryRule, StepPrice, row_bytes
from twinspark.engine.pages import PageStore
from twinspark.engine.pieces import LEAST_ROWS, RowCosts
from twinspark.engine.pool import PagePool
from twinspark.engine.request import Clock
from twinspark.engine.runner import PagedCaches
from twinspark.engine.scheduler import Scheduler


def num_pages(config: EngineConfig, context_tokens: int) -> int:
    """Pages of the pool: as many as asked for, or every slot's whole context and one more.

    The one more is for saved prefixes: requests without a limit reserve a whole context each, and
    while all slots run such ones nothing else would be left.
    """
    if config.pool_tokens is None:
        return (config.slots + 1) * -(-context_tokens // config.page_tokens)
    return config.pool_tokens // config.page_tokens


def new_scheduler(
    config: EngineConfig,
    model: ModelConfig,
    caches: PagedCaches,
    *,
    context_tokens: int,
    meter: MemoryMeter | None = None,
    clock: Clock = perf_counter,
) -> Scheduler:
    """A scheduler with everything free.

    Args:
        config: settings of the engine.
        model: sizes of its model.
        caches: only asked for the sizes of states.
        context_tokens: longest prompt plus reply.
        meter: reads memory on every rank; None is this machine's, if memory is watched at all.
        clock: seconds; for fairness, deadlines and predictions.
    """
    store = _new_store(config, model, caches, context_tokens)
    encoder_layers = model.first_decoder_layer
    costs = RowCosts(
        encoder_part=max(encoder_layers, 1) / model.num_hidden_layers,
        encoder_gap=model.encoder_gap,
        num_layers=model.num_hidden_layers,
    )
    return Scheduler(
        config,
        store,
        costs,
        history_tokens=model.engram_max_ngram_size - 1,
        memory=_new_memory_rule(config, model, meter),
        clock=clock,
    )


def _new_store(
    config: EngineConfig, model: ModelConfig, caches: PagedCaches, context_tokens: int
) -> PageStore:
    pool = PagePool(
        num_pages(config, context_tokens), config.page_tokens, from_top=config.pages_from_top
    )
    index = PrefixIndex(
        page_tokens=config.page_tokens,
        state_bytes=caches.state_bytes,
        encoder_state_bytes=caches.encoder_state_bytes,
        capacity_bytes=config.checkpoint_bytes if config.prefix_reuse else 0,
        pages=pool,
    )
    rules = MarkRules(
        spacing=config.checkpoint_spacing,
        encoder_gap=model.encoder_gap,
        window=model.sliding_window,
    )
    return PageStore(
        pool,
        index,
        rules=rules,
        is_saving=config.prefix_reuse and config.checkpoint_bytes >= caches.encoder_state_bytes,
        context_tokens=context_tokens,
    )


def _new_memory_rule(
    config: EngineConfig, model: ModelConfig, meter: MemoryMeter | None
) -> MemoryRule | None:
    if not config.memory_target_bytes and not config.memory_floor_bytes:
        return None
    price = StepPrice(
        row_bytes=row_bytes(model),
        scratch_bytes=config.index_scratch_bytes,
        least_rows=min(config.prompt_rows, max(LEAST_ROWS, CPU_PREFILL_CHUNK // 8)),
    )
    return MemoryRule(
        meter or LocalMemory(),
        price,
        target_bytes=config.memory_target_bytes,
        floor_bytes=config.memory_floor_bytes,
    )
