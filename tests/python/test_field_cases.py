"""Every case of tests/field-cases.md has a row, and the tests that it names are in the sources."""

import pathlib
import re

TESTS = pathlib.Path(__file__).resolve().parent.parent


def rows():
    for line in (TESTS / "field-cases.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"F\d\d", cells[0]):
            yield cells


def test_every_case_has_a_row():
    assert [cells[0] for cells in rows()] == [f"F{number:02}" for number in range(1, 60)]


def test_named_tests_exist():
    sources = "".join(path.read_text() for path in sorted(TESTS.glob("**/*_test.cc")))
    known = set(re.findall(r"TEST(?:_P|_F)?\(\s*(\w+),\s*(\w+)\)", sources))
    for case, _, tests in rows():
        named = re.findall(r"`(\w+)\.(\w+)`", tests)
        assert named or tests.startswith("not reachable: "), case
        for name in named:
            assert name in known, f"{case}: no test {'.'.join(name)}"


def test_cases_in_comments_are_listed():
    listed = {cells[0] for cells in rows()}
    for path in TESTS.glob("**/*_test.cc"):
        for comment in re.findall(r"TEST(?:_P|_F)?\([^\n]*//([^\n]*)", path.read_text()):
            assert set(re.findall(r"\bF\d\d\b", comment)) <= listed, path
