"""An engine on one rank of the full-size model: what it adds to recorded rounds, and long prompts.

Weights are random, so replies mean nothing and no draft is right; all drafts are run all the same,
as many as the model's blocks give. Read next: `rank.py`, `device_idle.py`, `stall.py`.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from twinspark.bench.device_idle import Kind, measure_idle
from twinspark.bench.rank import Rank
from twinspark.bench.stall import measure_stall, random_ids
from twinspark.config.engine import EngineConfig
from twinspark.engine.core import Engine
from twinspark.messages import Failed, GenerateRequest, Sampling, TokenDelta
from twinspark.text.tokenizer import Tokenizer

SLOTS = 4
STREAMS = 3
REPLY_TOKENS = 2048
_IDLE_KINDS: tuple[Kind, ...] = ("no drafts", "draft passes")


@dataclass(frozen=True, kw_only=True)
class PromptAlone:
    """A long prompt that nothing runs beside.

    Attributes:
        tokens: of it.
        seconds: from its submission to its first token.
        tokens_per_s: the one over the other.
    """

    tokens: int
    seconds: float
    tokens_per_s: float


def engine_of(
    rank: Rank,
    tokenizer: Tokenizer,
    *,
    context: int,
    prompt_tokens: int,
    reply_tokens: int = REPLY_TOKENS,
) -> Engine:
    """An engine of four slots that always drafts by the model's blocks, and never by copying.

    Args:
        rank: what it runs; sums over ranks are stand-ins.
        tokenizer: of any pack; no more tokens than it has are ever chosen.
        context: tokens of the prompts that are decoded behind.
        prompt_tokens: of the long prompt.
        reply_tokens: room for what is decoded behind either.
    """
    config = EngineConfig(
        device=str(rank.model.device),
        slots=SLOTS,
        max_context_tokens=max(context, prompt_tokens) + reply_tokens,
        priced_drafts=False,  # prices would end drafting, as no draft is right
        lookup=False,
        prefix_reuse=False,
    )
    return Engine(rank.model, tokenizer, config)


def measure_prompt(engine: Engine, tokens: int, *, seed: int) -> PromptAlone:
    """Run a prompt of random tokens, and leave nothing open."""
    request = GenerateRequest(
        request_id=f"prompt-{seed}",
        prompt_ids=tuple(random_ids(engine, tokens, seed=seed)),
        sampling=Sampling(temperature=0.0, max_tokens=1),
        reuse=False,
    )
    began_s = perf_counter()
    engine.submit(request)
    seconds = 0.0
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, TokenDelta):
                seconds = perf_counter() - began_s
    assert seconds, "a prompt without a token"
    return PromptAlone(tokens=tokens, seconds=seconds, tokens_per_s=tokens / seconds)


def measure_engine(
    engine: Engine, *, context: int, prompt_tokens: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Figures by name, in the order in which they are there.

    Each prompt is run twice, alone and beside streams: the first one tells the engine what prompts
    cost, and loads kernels.

    Args:
        engine: see `engine_of`.
        context: tokens of the prompts of those that decode.
        prompt_tokens: of the long prompt.
    """
    for seed in range(2):
        yield "prompt alone", asdict(measure_prompt(engine, prompt_tokens, seed=seed))
    prompts = [random_ids(engine, context, seed=10 + slot) for slot in range(SLOTS)]
    for _ in range(2):
        stall = measure_stall(engine, prompts[:STREAMS], prompt_tokens=prompt_tokens)
        yield "prompt beside streams", asdict(stall)
    for kind in _IDLE_KINDS:
        for slots in (1, SLOTS):
            yield "idle", asdict(measure_idle(engine, prompts[:slots], kind))


def figures_line(name: str, found: dict[str, Any]) -> str:
    """One of them as text."""
    if name == "prompt alone":
        return (
            f"engine: prompt of {found['tokens']} tokens alone: {found['seconds']:.3f} s, "
            f"{found['tokens_per_s']:,.0f} tokens/s"
        )
    if name == "idle":
        return (
            f"engine: {found['kind']}, {found['slots']} slots, {found['rows']:.0f} rows a round: "
            f"{found['round_us'] / 1e3:.3f} ms a round, device idle {found['idle_us']:.0f} us of it"
        )
    return (
        f"engine: prompt of {found['prompt_tokens']} tokens beside {found['streams']} streams: "
        f"{found['prompt_seconds']:.3f} s, longest gap {max(found['longest_gap_ms']):.1f} ms = "
        f"{found['longest_rounds']:.1f} rounds, {found['rounds_kept']:.2f} of their rounds kept"
    )
