"""A pytest plugin about pytest's own processes: where one that hangs is, and a crash that fails one test.

`.ci/test.py` loads it (`-p tests.workers`), for notebooks too; tests/conftest.py takes its scheduler.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import shutil
import signal
import tempfile
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


def pytest_configure(config: pytest.Config) -> None:
    """At SIGUSR1, which `.ci/test.py` sends to a stage that is silent for too long, write the stacks of all threads."""
    # output is not captured yet
    faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True)
    if config.pluginmanager.has_plugin("nbval"):
        _kernels_without_ports()


def _kernels_without_ports() -> None:
    """Kernels of notebooks listen at files: a port that nbval chooses may be another process's before the kernel binds
    it, and the kernel "died before replying"."""
    from nbval import kernel

    theirs = kernel.KernelManager
    folder = tempfile.mkdtemp(prefix="jvkernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def manager(**options: Any) -> Any:
        return theirs(transport="ipc", ip=f"{folder}/{uuid.uuid4()}", **options)

    kernel.KernelManager = manager


class CrashesFailOnce(LoadFileScheduling):
    """`--dist loadfile` of xdist 3.8 without what makes it hang, or repeat, after a worker has crashed.

    There a test that crashed its worker is run again, and crashes the next one; a new worker is given work before it
    has collected (KeyError); and one that was given a single test waits for ever to be told what comes after it.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Forget a worker. If it crashed, return the test that it ran, which has failed; others get the rest."""
        units = self.assigned_work.pop(node)
        left = [
            nodeid
            for unit in units.values()
            for nodeid, done in unit.items()
            if not done
        ]
        if not left:
            return None
        crashed = left[0]
        for scope, unit in units.items():
            if crashed in unit:
                unit[crashed] = True
            if not all(unit.values()):
                self.workqueue[scope] = unit
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # it still collects, and is given work afterwards
        super()._reschedule(node)
        if node.shutting_down:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)  # it runs a test only when it knows the next
        if not self.workqueue:
            node.shutdown()  # when it has run what it has


@pytest.hookimpl(optionalhook=True, trylast=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    return (
        CrashesFailOnce(config, log) if config.getoption("dist") == "loadfile" else None
    )
