"""twinspark: an exact engine and server for DeepSeek-V4.1-Flash EXL3 packs.

`from twinspark import LLM, Sampling` is the library; `twinspark --help` the program. Importing the
package is cheap: torch is loaded only when `LLM` is first touched. Read next: `llm.py`.
"""

from typing import TYPE_CHECKING, Any

from twinspark.messages import Sampling
from twinspark.version import VERSION as __version__

if TYPE_CHECKING:
    from twinspark.llm import LLM

__all__ = ["LLM", "Sampling", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from twinspark.llm import LLM

        return LLM
    raise AttributeError(f"module 'twinspark' has no attribute {name!r}")
