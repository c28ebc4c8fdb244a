"""The table of requirements names every one of them, and only tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
TABLE = TESTS.parent / "docs" / "reference" / "requirements.md"
ROW = re.compile(r"^\| R(\d+) \|(.+)\|(.*)\|(.*)\|$", re.MULTILINE)


def test_every_requirement_has_a_row_with_tests_or_a_reason() -> None:
    rows = ROW.findall(TABLE.read_text("utf-8"))
    assert [int(number) for number, *_ in rows] == list(range(1, 102))
    for number, title, tests, remark in rows:
        assert title.strip() and (tests.strip() or remark.strip()), number


def test_every_test_of_the_table_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE.read_text("utf-8"))
    assert len(named) > 120
    for file, name in named:
        source = (TESTS / file).read_text("utf-8")
        assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{file}::{name}"


def test_tests_named_after_a_requirement_are_in_its_row() -> None:
    rows = {number: tests for number, _, tests, _ in ROW.findall(TABLE.read_text("utf-8"))}
    named = re.compile(r"^(?:async )?def (test((?:_r\d+)+)_\w+)\(", re.MULTILINE)
    for file in TESTS.rglob("test_*.py"):
        for name, numbers in named.findall(file.read_text("utf-8")):
            for number in re.findall(r"\d+", numbers):
                place = f"{file.relative_to(TESTS).as_posix()}::{name}`"
                assert place in rows[str(int(number))], (number, place)
