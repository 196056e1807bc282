"""Every check that a CPU engine can't fail, on a fake one: it passes, and fails for each fault that is planted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jvlab import errors
from jvlab._deadline import Deadline
from jvlab.analysis.certification import _certify, _checks
from jvlab.analysis.certification._certificate import (
    Certificate,
    CertificateRow,
    Finding,
)
from jvlab.analysis.certification._checks import judge, rounded_apart
from jvlab.analysis.certification._subject import (
    as_loaded,
    differences,
    known_values,
    values_held,
)
from jvlab.layout._plan_types import numpy_dtype
from tests.analysis.certification.fake_subject import FakeSubject, identity
from tests.sync import quantised_world

STAGED, DIRECT = _checks.failed_staged, _checks.failed_direct
KEEPS, DROPS, GRAPHS = (
    _checks.sleep_1,
    _checks.sleep_2,
    _checks.graphs,
)


@pytest.mark.parametrize(
    "check",
    [KEEPS, DROPS, GRAPHS, STAGED, DIRECT, _checks.scored],
    ids=lambda c: c.__name__,
)
def test_a_sound_engine_passes(check):
    found = check(FakeSubject())
    assert found.state == "pass", found
    assert not found.first_wrong


@pytest.mark.parametrize(
    ("fault", "check", "says", "names"),
    [
        ("graph sees the old head", GRAPHS, "decoded by a graph", "head.weight"),
        (
            "sleep negates the head",
            KEEPS,
            "changed while the engine slept",
            "head.weight (rank 0): 960 of 960",
        ),
        ("sleep 1 is ignored", KEEPS, "no engine slept", ""),
        (
            "dropped weights are served",
            DROPS,
            "weights that were dropped",
            "every parameter",
        ),
        (
            "a mixture is served",
            DIRECT,
            "parts of two versions",
            "embed.weight (rank 0)",
        ),
        (
            "staged writes live memory",
            STAGED,
            "changed in a staged sync that failed",
            "embed.weight (rank 0)",
        ),
        ("staged changes the version", STAGED, "the version is 1", ""),
    ],
)
def test_a_planted_fault_fails_and_is_named(fault, check, says, names):
    found = check(FakeSubject(fault))
    assert found.state == "fail", found
    assert says in found.detail
    assert names in found.first_wrong


def test_what_does_not_apply_has_its_reason():
    assert "not supported on CPU" in KEEPS(FakeSubject(device="cpu")).detail
    assert "not supported on CPU" in DROPS(FakeSubject(device="cpu")).detail
    assert "runs on cpu" in GRAPHS(FakeSubject(device="cpu")).detail
    assert "enforce_eager" in GRAPHS(FakeSubject(graph_tokens=0)).detail
    refused = FakeSubject()
    refused.refused = "no link to this engine: LayoutError: fp8"
    for check in (
        DROPS,
        GRAPHS,
        STAGED,
        DIRECT,
        lambda s: _checks.arrives(s, "direct"),
        _checks.restored,
    ):
        found = check(refused)
        assert (found.state, "fp8" in found.detail) == ("not applicable", True)


def test_weights_too_much_alike_tell_nothing_about_graphs():
    subject = FakeSubject("graph sees the old head")
    subject._sets["known"] = {
        n: v + np.float32(1e-7) for n, v in subject.values("original").items()
    }
    found = GRAPHS(subject)
    assert (found.state, "can't be told" in found.detail) == ("not applicable", True)


def test_an_error_in_a_check_fails_it():
    def broken(_: object) -> Finding:
        raise errors.ReplicaLost("fake/0 died")

    row = _certify._row("scored", broken, FakeSubject())
    assert (row.state, row.detail) == ("fail", "it ended with ReplicaLost: fake/0 died")


def test_out_of_time_is_not_run_and_no_failure():
    def broken(subject: FakeSubject) -> Finding:
        subject.deadline = Deadline(0)
        raise errors.ConfigError("timeout must be positive, not 0.0")

    subject = FakeSubject()
    row = _certify._row("scored", broken, subject)  # type: ignore
    assert row.state == "not run"
    assert "timeout must be positive" in row.detail
    late = _certify._row("graphs", GRAPHS, subject)
    assert (late.state, late.detail) == (
        "not run",
        "the time was up: pass a longer timeout",
    )
    fine = CertificateRow("restored", "same?", "pass", "fine")
    found = Certificate("llama", {}, (row, fine), 3)
    assert found.counts == {"pass": 1, "fail": 0, "not applicable": 0, "not run": 1}
    assert not found, "what was not run is not certified"
    assert "not run" in found._repr_html_()


def test_known_values_and_the_memory_they_make():
    import ml_dtypes

    first = {
        "a": np.ones((4, 6), np.float32),
        "b": np.zeros(3, ml_dtypes.bfloat16),
        "n": np.arange(3),
    }
    one, two = known_values(first, 1), known_values(first, 2)
    assert one["a"].std() > 0, "norms of all 1 would hide a mix-up"
    assert not np.array_equal(one["a"], two["a"])
    assert one["b"].dtype == first["b"].dtype
    assert np.count_nonzero(one["b"]) == 3
    assert one["n"] is first["n"]
    floats = {"a": first["a"], "c": np.full((2, 2), 0.5, np.float32)}
    layout, values = identity(floats), known_values(floats, 3)
    before = {(0, n): np.zeros(v.size, np.float32) for n, v in floats.items()}
    memory = as_loaded([layout], values, before)
    back, left = values_held([layout], memory)
    assert not left
    assert all(np.array_equal(back[n], values[n]) for n in floats)
    assert not differences(memory, as_loaded([layout], values, before))
    memory[0, "c"][2] = np.nextafter(memory[0, "c"][2], np.float32(9))
    (wrong,) = differences(as_loaded([layout], values, before), memory)
    assert str(wrong).startswith("c (rank 0): 1 of 4 elements, from element 2: ")
    assert [d.parameter for d in differences(memory, {})] == ["a", "c"], (
        "what is missing differs"
    )
    _, left = values_held([layout], {(0, "a"): memory[0, "a"]})
    assert list(left) == ["c"]


def test_scales_of_fp8_are_compared_and_known_values_fit_its_range():
    subject = FakeSubject()
    subject.layouts = [quantised_world.engine()]
    assert _checks.loader_only(subject) == set()
    wide = known_values({"a": np.full((64, 64), 400, numpy_dtype("float8_e4m3fn"))}, 1)[
        "a"
    ].astype(np.float32)
    assert np.isfinite(wide).all()
    assert wide.max() == 448


def test_of_an_adapter_rounding_passes_and_faults_fail():
    """Nats measured with bfloat16 weights: eight adapters of a tiny llama, each also twice as strong and in the wrong
    layer, and one that an engine on a card computed; float32 is bound as before.
    """
    rows = [  # merged, without, half a step, twice as strong, of another layer
        (0.0735, 4.479, 0.2004, 3.5341, 4.9829),
        (0.0469, 4.1168, 0.1769, 3.0559, 4.046),
        (0.066, 4.5275, 0.1789, 3.2869, 5.0611),
        (0.0741, 4.3894, 0.1894, 4.5645, 3.4016),
        (0.0571, 3.9489, 0.1914, 2.5774, 4.0627),
        (0.0441, 4.0378, 0.1613, 4.0175, 3.9191),
        (0.0982, 3.5622, 0.1088, 3.2949, 4.2279),
        (0.0953, 3.4338, 0.207, 2.6309, 3.6662),
    ]
    for right, without, step, *faults in rows:
        assert judge(right, without, step, 0.1, 1).state == "pass"
        assert {judge(fault, without, step, 0.1, 1).state for fault in faults} == {
            "fail"
        }
    assert judge(0.1004, 3.1, 0.1088, 0.1, 1).state == "pass"
    assert judge(float("nan"), 3.1, 0.1088, 0.1, 1).state == "fail"
    assert judge(1e-5, 4.7, 9e-6, 1e-3, 1).state == "pass"
    assert judge(2e-3, 4.7, 9e-6, 1e-3, 1).state == "fail"
    assert judge(0.5, 3.1, 0.4, 0.1, 1).state == "not applicable", (
        "rounding hides what the adapter does"
    )


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 2**-8), ("float32", 2**-24)])
def test_every_weight_is_rounded_apart(dtype: str, most: float):
    subject = FakeSubject()
    subject.facts.dtype = dtype
    before = {
        n: v.astype(numpy_dtype(dtype)) for n, v in subject.values("original").items()
    }
    after = rounded_apart(subject, before)
    assert after["scale.weight"] is before["scale.weight"], "a norm has no matrix"
    for name in ("embed.weight", "head.weight"):
        one, two = (x[name].astype(np.float64) for x in (before, after))
        assert np.mean(one != two) > 0.4
        assert np.abs(two / one - 1).max() <= 2.1 * most


def test_a_certificate_says_what_it_is_in_text_html_and_json():
    rows = (
        CertificateRow("scored", "equal?", "pass", "fine", "", 0.5),
        CertificateRow(
            "graphs", "seen?", "fail", "two < three", "head.weight & more", 1.0
        ),
        CertificateRow("sleep 1", "kept?", "not applicable", "on a CPU", "", 0.0),
    )
    found = Certificate(
        "llama",
        {"device": "cpu", "quantization": "none"},
        rows,
        3,
        1.5,
        ("sync again",),
    )
    assert (
        repr(found)
        == "Certificate(llama: 1 pass, 1 fail, 1 not applicable; no independent reference)"
    )
    assert not found
    assert [row.name for row in found.failed] == ["graphs"]
    assert "First wrong: head.weight & more." in str(found)
    html = found._repr_html_()
    assert "two &lt; three" in html
    assert "first wrong: head.weight &amp; more" in html
    plain = json.loads(found.to_json())
    assert plain["counts"] == {"pass": 1, "fail": 1, "not applicable": 1}
    assert plain["checks"][1]["first_wrong"] == "head.weight & more"
    assert Certificate("llama", {}, rows[:1], 3).ok
    assert not Certificate("llama", {}, rows[2:], 3).ok, "nothing was checked"
    with pytest.raises(KeyError, match="none of the checks: scored"):
        found["sleep 9"]


def test_an_unknown_check_is_refused_with_the_names():
    with pytest.raises(
        errors.ConfigError, match=r"(?s)no check is called 'sleeps'.*sleep 1"
    ):
        _certify._chosen(["sleeps"])
    assert _certify._chosen("scored") == ["scored", "restored"]
    assert all(callable(_certify._function(name)) for name in _certify.CHECKS)
