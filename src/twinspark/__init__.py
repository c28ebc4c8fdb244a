"""twinspark: an exact engine and server for DeepSeek-V4.1-Flash EXL3 packs.

`from twinspark import LLM, Sampling` is the library; `twinspark --help` the program. Importing the
package is nearly free: what it names is loaded when it is first touched. Read next: `llm.py`.
"""

from twinspark.version import VERSION as __version__

TYPE_CHECKING = False  # as typing's, which takes longer to import than the whole package
if TYPE_CHECKING:
    from twinspark.llm import LLM
    from twinspark.messages import Sampling

__all__ = ["LLM", "Sampling", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from twinspark.llm import LLM

        return LLM
    if name == "Sampling":
        from twinspark.messages import Sampling

        return Sampling
    raise AttributeError(f"module 'twinspark' has no attribute {name!r}")
