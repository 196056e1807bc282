"""When ipc is chosen, and what is said where it can't be."""

from __future__ import annotations

import pytest

from jvlab._errors import ConfigError
from jvlab.transport import choose

MIB = 1 << 20


def chosen(
    wanted: str, same_host: bool, device: str, engine: str, no_ipc: str = ""
) -> tuple[str, str]:
    return choose(wanted, same_host, device, 100 * MIB, MIB, engine, no_ipc)


@pytest.mark.parametrize("wanted", ["auto", "ipc"])
@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_both_on_gpus_of_one_host(wanted: str, device: str):
    name, why = chosen(wanted, True, device, "cuda")
    assert name == "ipc"
    assert "one host" in why


@pytest.mark.parametrize(
    ("same_host", "device", "engine", "no_ipc", "words"),
    [
        (False, "gpu", "cuda", "", "different hosts"),
        (True, "cpu", "cuda", "", "the parameters are on cpu"),
        (True, "gpu", "cuda", "cupy is not installed here", "cupy"),
    ],
)
def test_refused_with_a_remedy(
    same_host: bool, device: str, engine: str, no_ipc: str, words: str
):
    for wanted in ("auto", "ipc") if same_host else ("ipc",):
        with pytest.raises(ConfigError, match=words) as caught:
            chosen(wanted, same_host, device, engine, no_ipc)
        assert caught.value.remedy


def test_cpu_engines_go_on_as_before():
    assert chosen("auto", True, "gpu", "cpu")[0] == "shm"
    with pytest.raises(ConfigError, match="engines run on cpu"):
        chosen("ipc", True, "gpu", "cpu")
