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


def test_tests_named_after_a_requirement_are_in_the_table() -> None:
    table = TABLE.read_text("utf-8")
    for file in (TESTS / "cases").glob("test_*.py"):
        for name in re.findall(r"^def (test_r\d+\w*)\(", file.read_text("utf-8"), re.MULTILINE):
            assert f"cases/{file.name}::{name}`" in table, name
