"""Brings the archives of sources.toml into DEMO/archives, through the registries' own clients.

    python -m tools.demo.fetch DEMO          what is missing; can be broken off and called again
    python -m tools.demo.fetch DEMO --pin    also accept new entries, and write down their digests

Every archive must have the digest that the table names. Read next: `data.py`.
"""

import argparse
import pathlib
import shutil
import subprocess
import tempfile
import time
from dataclasses import replace

from tools.demo import sources
from tools.demo.sources import Source


def folder_of(demo: pathlib.Path) -> pathlib.Path:
    """Where the archives lie."""
    return demo / "archives"


def command(source: Source) -> list[str]:
    """The client's call that puts the archive into the current folder."""
    if source.registry == "npm":
        return ["npm", "pack", "--silent", f"{source.package}@{source.version}"]
    if source.registry == "debian":
        return ["apt-get", "download", "-q", f"{source.package}={source.version}"]
    call = ["pip", "download", "-q", "--no-deps"]
    if not source.file.endswith(".gz"):
        call.append("--only-binary=:all:")
    *_, platforms = source.file.removesuffix(".whl").split("-")
    if source.file.endswith(".whl") and platforms != "any":  # the same on every machine
        call += ["--python-version", "3.11", "--implementation", "cp"]
        call += [f"--platform={platform}" for platform in platforms.split(".")]
    return [*call, f"{source.package}=={source.version}"]


def bring(source: Source, folder: pathlib.Path, *, pin: bool = False) -> Source:
    """Downloads one archive, and checks it.

    Args:
        source: what to bring.
        folder: where to.
        pin: take an entry without digest, and return it with file name and digest.

    Raises:
        ValueError: the client failed, or the archive is not the one of the table.
    """
    if not source.sha256 and not pin:
        raise ValueError(f"{source.package}: the table has no digest; call with --pin once")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        try:
            result = subprocess.run(
                command(source), cwd=place, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise ValueError(
                f"{source.package}: {command(source)[0]} is not installed, which fetches it"
            ) from None
        found = sorted(pathlib.Path(place).iterdir())
        if result.returncode != 0 or len(found) != 1:
            called = command(source)
            old = " (old lists of packages? run apt-get update)" if called[0] == "apt-get" else ""
            raise ValueError(
                f"{source.package} {source.version}: `{' '.join(called)}` gave "
                f"{len(found)} files{old}: {result.stderr.strip()[-500:]}"
            )
        made = sources.digest(found[0])
        if source.sha256 not in ("", made):
            raise ValueError(
                f"{source.package} {source.version}: expected digest {source.sha256}, got {made}; "
                "the registry has another build now, see tools/demo/README.md"
            )
        named = replace(source, file=found[0].name, sha256=made)
        shutil.move(found[0], folder / named.file)
        return named


def is_here(source: Source, folder: pathlib.Path) -> bool:
    """Whether the right archive is already there."""
    path = folder / source.file
    return bool(source.file) and path.is_file() and sources.digest(path) == source.sha256


def fetch(demo: pathlib.Path, table: pathlib.Path, *, pin: bool = False) -> None:
    """Brings every archive that is missing; prints one line each."""
    folder = folder_of(demo)
    folder.mkdir(parents=True, exist_ok=True)
    known = list(sources.load(table))
    began, failed = time.monotonic(), []
    for n, source in enumerate(known):
        state = "here"
        if not is_here(source, folder):
            try:
                known[n] = bring(source, folder, pin=pin)
                state = "fetched"
            except ValueError as error:
                failed.append(str(error))
                state = "failed"
        seconds = time.monotonic() - began
        print(f"{n + 1:3d}/{len(known)} {seconds:5.0f} s  {state:8s} {source.package}", flush=True)
    if pin:
        sources.dump(known, table)
    if failed:
        raise SystemExit("\n".join(failed))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=pathlib.Path)
    parser.add_argument("--table", type=pathlib.Path, default=sources.TABLE)
    parser.add_argument("--pin", action="store_true", help="write digests of new entries")
    args = parser.parse_args()
    fetch(args.demo, args.table, pin=args.pin)


if __name__ == "__main__":
    main()
