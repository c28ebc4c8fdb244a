"""Which source is running: a digest of all of it, and the commit where there is one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from twinspark import version

PACKAGE = Path(version.__file__).resolve().parent


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of three files, in place of the one that is running."""
    found = tmp_path / "src" / "twinspark"
    found.mkdir(parents=True)
    shutil.copy(PACKAGE / "version.py", found)
    (found / "rows.cu").write_text("// one")
    (found / "notes.md").write_text("one")
    monkeypatch.setattr(version, "__file__", str(found / "version.py"))
    forget()
    yield found
    forget()


def forget():
    version.code_digest.cache_clear()
    version.source_facts.cache_clear()


def digest():
    version.code_digest.cache_clear()
    return version.code_digest()


def test_the_digest_is_of_kernels_too_and_of_nothing_else(package):
    before = digest()
    (package / "notes.md").write_text("two")
    assert digest() == before
    (package / "rows.cu").write_text("// two")
    changed = digest()
    assert changed != before
    (package / "rows.cu").rename(package / "tiles.cu")
    assert digest() not in (before, changed)


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


def test_the_commit_of_a_checkout(package):
    top = package.parents[1]
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "one")
    clean = version.commit()
    assert len(clean) == 7
    (top / "README.md").write_text("not a source")
    assert version.commit() == clean
    (package / "rows.cu").write_text("// two")
    assert version.commit() == clean + "+"
    facts = version.source_facts()
    assert facts == {"twinspark": version.VERSION, "commit": clean + "+", "code": digest()}
    (package / "rows.cu").write_text("// three")
    version.code_digest.cache_clear()
    assert version.source_facts() == facts  # of what ran when it was asked first


def test_the_commit_of_another_repository_is_not_ours(package, monkeypatch):
    top = package.parents[1]
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "one")
    assert version.commit() is not None
    inside = top / "env" / "twinspark"
    shutil.copytree(package, inside)
    monkeypatch.setattr(version, "__file__", str(inside / "version.py"))
    assert version.commit() is None


def test_a_copy_that_a_repository_does_not_hold_has_none_of_its_commits(package):
    top = package.parents[1]
    (top / ".gitignore").write_text("src\n")
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "one")
    assert version.commit() is None


def test_new_sources_are_seen_whatever_the_settings(package, monkeypatch):
    top = package.parents[1]
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "one")
    git(top, "config", "status.showUntrackedFiles", "no")
    (package / "new.cu").write_text("")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert version.commit().endswith("+")


def test_no_commit_without_git(package, monkeypatch):
    assert version.commit() is None  # no repository
    monkeypatch.setenv("PATH", "")
    assert version.commit() is None


def test_a_folder_whose_name_is_no_text(package, monkeypatch):
    top = os.fsencode(package.parents[1].parent) + b"/r\xff"
    os.rename(package.parents[1], top)
    moved = Path(os.fsdecode(top)) / "src" / "twinspark"
    monkeypatch.setattr(version, "__file__", str(moved / "version.py"))
    git(moved.parents[1], "init", "-q")
    git(moved.parents[1], "add", ".")
    git(moved.parents[1], "commit", "-q", "-m", "one")
    assert len(version.commit()) == 7
