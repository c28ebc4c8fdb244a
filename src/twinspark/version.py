"""The version, for packs, statistics and `--version`, and which source exactly is running.

Nothing of the package is imported here, and nothing slow: every start comes through.
"""

import os
from functools import cache

VERSION = "0.1.0.dev0"

_SOURCES = (".py", ".cu", ".cuh")
_GIT_S = 5.0


@cache
def code_digest() -> str:
    """Digest of the package's own sources, kernels among them: ranks must have the same."""
    from pathlib import Path

    import blake3

    root = Path(__file__).resolve().parent
    hasher = blake3.blake3()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _SOURCES):
        content = path.read_bytes()
        hasher.update(f"{path.relative_to(root).as_posix()}\n{len(content)}\n".encode())
        hasher.update(content)
    return str(hasher.hexdigest())[:16]


def commit() -> str | None:
    """The commit of the checkout that is running, "+" behind it where sources differ from it.

    None where the package is no part of a repository, lies elsewhere in it, or git is not there.
    """
    from pathlib import Path
    from subprocess import SubprocessError

    package = Path(__file__).resolve().parent
    try:
        top = _git(package, "rev-parse", "--show-toplevel")
        if Path(top).resolve() / "src" / "twinspark" != package:
            return None  # another repository, around the environment it is installed in
        _git(package, "ls-files", "--error-unmatch", "--", Path(__file__).name)  # it is of that one
        changed = _git(package, "status", "--porcelain", "--untracked-files=all", "--", ".")
        return _git(package, "rev-parse", "--short=7", "HEAD") + ("+" if changed else "")
    except (OSError, SubprocessError):
        return None


@cache
def source_facts() -> dict[str, str | None]:
    """What figures are told to be of: version, commit, and digest of the code.

    As they were when this was asked first: ask before measuring, a checkout may change meanwhile.
    """
    return {"twinspark": VERSION, "commit": commit(), "code": code_digest()}


def _git(folder: os.PathLike[str], *arguments: str) -> str:
    from subprocess import run

    command = ["git", "-C", str(folder), *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    found = run(command, capture_output=True, timeout=_GIT_S, check=True, env=own)
    return os.fsdecode(found.stdout).strip()
