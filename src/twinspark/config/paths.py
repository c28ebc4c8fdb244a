"""Where files of the package itself lie. Read next: `llm.py`, `cli/`."""

from pathlib import Path

from twinspark.config.env import cache_home
from twinspark.errors import ConfigError

_DEMO_PACK = Path(__file__).resolve().parent.parent / "demo" / "pack"


def demo_pack_path() -> Path:
    """Folder of the demo pack inside the installed package.

    Raises:
        ConfigError: the package was installed without it.
    """
    path = _DEMO_PACK
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"this installation has no demo pack (expected {path}/config.json); "
            "name the folder of a pack, or install twinspark again"
        )
    return path


def pack_name(path: Path) -> str:
    """What a pack is called where nobody says otherwise: its folder's name, or "demo"."""
    resolved = path.resolve()
    return "demo" if resolved == _DEMO_PACK else resolved.name


def measured_costs_path() -> Path:
    """Folder of what `engine/cost_probe.py` measured at earlier starts; may not exist yet."""
    return cache_home() / "twinspark" / "costs"


def compiled_kernels_path() -> Path:
    """Folder of machine code that `kernels/cuda/compile.py` made; may not exist yet."""
    return cache_home() / "twinspark" / "kernels"
