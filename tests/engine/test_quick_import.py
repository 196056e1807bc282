"""What importing vLLM need not do."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import jvlab.engine
import jsonschema
assert "lark" not in sys.modules, "the grammar was parsed"
for format, value in (("iri", "http://ü.example/a"), ("iri", "no iri"), ("iri-reference", "a b")):
    print(jsonschema.FormatChecker().conforms(value, format))
assert "lark" in sys.modules
"""


def test_a_grammar_is_parsed_when_somebody_needs_it():
    pytest.importorskip("jsonschema")
    pytest.importorskip("lark")
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "False"]
