"""`twinspark prebuild`: compile what a pack needs on this machine's GPU, ahead of the first start.

Kernels are compiled when they are first run and kept on disk (`kernels/cuda/compile.py`). Which
ones a pack needs depends on its sizes and widths and on the device, so the surest list is what its
own prompts and replies ask for: a few of each kind are run. Read next: `doctor.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from twinspark.errors import ConfigError

if TYPE_CHECKING:
    from twinspark.messages import Sampling

PROMPT_WORDS = (3, 40, 200, 700, 2500)
_REPLY_TOKENS = 24
_COMPANY = (1, 2, 4)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("prebuild")(prebuild)


def prebuild(
    pack: Annotated[Path | None, typer.Argument(help="Pack folder; none: the demo pack.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
) -> None:
    """Compile every GPU kernel that a pack needs, so that no start or request waits for it.

    Loads the pack and runs short prompts and replies. Nothing is compiled that was before.
    """
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    from twinspark.config.engine import EngineConfig
    from twinspark.config.paths import compiled_kernels_path
    from twinspark.kernels.cuda.compile import why_not_compile
    from twinspark.llm import LLM

    if device.partition(":")[0] != "cuda":
        raise ConfigError(f"--device is {device!r}, expected cuda or cuda:N: CPUs compile nothing")
    if (reason := why_not_compile()) is not None:
        raise ConfigError(f"nothing can be compiled here: {reason}")
    folder = compiled_kernels_path()
    before, started = count_kernels(folder), perf_counter()
    console = Console(stderr=True)
    with console.status("loading the pack"):
        llm = LLM(pack, config=EngineConfig(device=device, slots=max(_COMPANY)))
    bar = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console)
    with llm, bar:
        most = llm.engine.context_tokens // 3  # a number may be two tokens
        lengths = [length for length in PROMPT_WORDS if length <= most]
        runs = [
            (length, company, sampling)
            for length in lengths for company in _COMPANY for sampling in samplings()
        ]  # fmt: skip
        for length, company, sampling in bar.track(runs, description="compiling"):
            texts = [_text(length, n) for n in range(company)]
            llm.generate_many(texts, sampling)
    made = count_kernels(folder) - before
    seconds = perf_counter() - started
    print(f"{made} kernels compiled in {seconds:.0f} s, {before + made} kept in {folder}")


def _text(num_words: int, salt: int) -> str:
    """Text of about as many tokens, another for each salt."""
    return " ".join(str((salt + 7 * i) % 100) for i in range(num_words))


def samplings() -> "Iterator[Sampling]":
    """Replies of every kind: greedy and drawn, drafted and serial, with and without scores."""
    from twinspark.messages import Sampling

    yield Sampling(max_tokens=_REPLY_TOKENS, ignore_eos=True, temperature=0.0)
    yield Sampling(max_tokens=_REPLY_TOKENS, ignore_eos=True, seed=1, top_k=20, min_p=0.02)
    yield Sampling(
        max_tokens=_REPLY_TOKENS, ignore_eos=True, seed=1, draft=False, logprobs=2,
        prompt_logprobs=1,
    )  # fmt: skip


def count_kernels(folder: Path) -> int:
    """Compiled kernels that are kept in a folder."""
    return len(list(folder.glob("*.cubin"))) if folder.is_dir() else 0
