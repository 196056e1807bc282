"""One real JupyterLab server, and a page of it in a real browser, as tests use them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import ViewportSize

ROOT = Path(__file__).resolve().parents[2]
# Everything that is not this machine; blob: and data: never leave it.
ELSEWHERE = re.compile(r"^(https?|wss?)://(?!127\.0\.0\.1[:/]|localhost[:/])")
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    # nothing leaves this machine
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]
BASE = "/user/someone"  # a prefix, as a JupyterHub has for each user
# What JupyterLab itself prints as an error, each with the reason why it is no fault of ours.
ALLOWED: dict[str, str] = {
    "Could not restore the debugger state": "it asked the kernel of a notebook that the test before had closed",
}
OVERRIDES = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
    # every output is in the page, also far below; a windowed notebook would take panels out while one scrolls
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
}
VIEWPORT: ViewportSize = {"width": 1280, "height": 900}
CONTEXT = "window.jupyterapp.shell.currentWidget.context"
# A kernel as new, but for what it has imported and compiled: as at its exit, runs stop, labs are left, panels close.
TIDY = """
import sys
for name, last in (("trainer._run", "_stop_all"), ("lab._lab", "_leave_all"), ("panels._live", "_make_all_static")):
    if f"jvlab.{name}" in sys.modules:
        getattr(sys.modules[f"jvlab.{name}"], last)()
if "jvlab.views.panels._live" in sys.modules:
    sys.modules["jvlab.views.panels._live"]._ending = False
if "ipywidgets" in sys.modules:
    sys.modules["ipywidgets"].Widget.close_all()
get_ipython().run_line_magic("reset", "-f")
"""
TIDIED = f"""async code => {{
  const kernel = {CONTEXT.replace(".currentWidget.", ".currentWidget?.")}?.sessionContext?.session?.kernel;
  if (!kernel || kernel.status !== 'idle' || kernel.connectionStatus !== 'connected') return null;
  const late = new Promise(done => setTimeout(() => done(null), 20000));
  const reply = await Promise.race([kernel.requestExecute({{code, store_history: false}}).done, late]);
  return reply?.content.status === 'ok' ? kernel.id : null;
}}"""


# A killed pytest must leave no server behind: Linux tells it to end with us (PR_SET_PDEATHSIG outlives exec). Not by
# a preexec_fn: that forks this process, and gRPC in it does not survive a fork.
END_WITH_US = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


class LabServer:
    """JupyterLab on 127.0.0.1 with settings, kernels and notebooks of its own; nothing of the user's is read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notebooks = folder, folder / "notebooks"
        self.notebooks.mkdir(parents=True)
        self.token = secrets.token_hex(16)
        # held, without listening, to the end: JupyterLab binds it seconds later, and nobody else is given it meanwhile
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}{BASE}"
        # As behind a JupyterHub: whatever is not below this prefix of this port cannot be reached from the page.
        self.elsewhere = re.compile(
            rf"(?!(http|ws)://127\.0\.0\.1:{self.port}{BASE}/)(https?|wss?)://"
        )
        self.log = folder / "jupyterlab.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command(),
                env=self._environment(),
                cwd=self.notebooks,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _command(self) -> list[str]:
        flags = {
            "ServerApp.port": self.port,
            "ServerApp.port_retries": 0,
            "ServerApp.base_url": BASE,
            "ServerApp.ip": "127.0.0.1",
            "IdentityProvider.token": self.token,
            "ServerApp.root_dir": self.notebooks,
            "LabApp.expose_app_in_browser": True,
            "JupyterNotebookApp.expose_app_in_browser": True,
            "LabApp.extension_manager": "readonly",
        }
        first = [sys.executable, "-c", END_WITH_US] if sys.platform == "linux" else []
        return [
            *first,
            *(
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "jupyterlab",
                "--no-browser",
                "--allow-root",
            ),
            *(f"--{name}={value}" for name, value in flags.items()),
        ]

    def _environment(self) -> dict[str, str]:
        names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
        homes = {f"JUPYTER_{n}": self.folder / n.lower() for n in names}
        homes |= {
            f"JUPYTERLAB_{n}": self.folder / n.lower()
            for n in ("SETTINGS_DIR", "WORKSPACES_DIR")
        }
        homes |= {"IPYTHONDIR": self.folder / "ipython"}
        for home in homes.values():
            home.mkdir(parents=True, exist_ok=True)
        settings = (
            homes["JUPYTER_CONFIG_DIR"] / "labconfig" / "default_setting_overrides.json"
        )
        settings.parent.mkdir()
        settings.write_text(json.dumps(OVERRIDES))
        path = os.pathsep.join(
            filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
        )
        return {
            **os.environ,
            **{k: str(v) for k, v in homes.items()},
            "PYTHONPATH": path,
        }

    def wait(self, seconds: float = 400.0) -> LabServer:
        """Until it answers."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.api("status")
                return self
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise AssertionError(
            f"JupyterLab did not come up in {seconds:.0f} s:\n{self.log.read_text()[-3000:]}"
        )

    def api(self, path: str, method: str = "GET") -> Any:
        """The server's REST interface."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(
            f"{self.url}/api/{path}", headers=headers, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def end_kernels(self, but: str | None = None) -> None:
        for kernel in self.api("kernels"):
            if kernel["id"] != but:
                self.api(f"kernels/{kernel['id']}", "DELETE")

    def close(self) -> None:
        """End the server and its kernels: the group of processes that it leads."""
        self._held.close()
        # it may be gone or stuck already; the signals below are for that
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            self.end_kernels()
        for sign, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(seconds)
                return
            except ProcessLookupError:
                self.process.wait(seconds)
                return
            except subprocess.TimeoutExpired:
                continue


class LabPage:
    """One notebook in one page. `raw` is playwright's own page, for what has no method here."""

    def __init__(
        self,
        server: LabServer,
        context: Any,
        name: str,
        raw: Any = None,
        kernel: str | None = None,
    ) -> None:
        self.server, self.name = server, name
        self._kernel = kernel  # of an earlier test, for this one's first notebook
        self.errors: list[str] = []  # console errors and uncaught exceptions
        # requests to anything but this server, below its prefix
        self.left: list[str] = []
        self._app = "lab/tree"
        # a page in which an earlier test has opened JupyterLab
        self._loaded = raw is not None
        self.raw = raw or context.new_page()
        self._listeners = {
            "console": lambda m: (
                self._heard(m.text, m.location) if m.type == "error" else None
            ),
            "pageerror": lambda e: self.errors.append(f"uncaught: {e}"),
            # told, not intercepted: each of JupyterLab's own files would pass through this process
            "request": lambda r: (
                self.left.append(r.url) if server.elsewhere.match(r.url) else None
            ),
            "websocket": lambda w: (
                self.left.append(w.url) if server.elsewhere.match(w.url) else None
            ),
        }
        for event, listener in self._listeners.items():
            self.raw.on(event, listener)

    def _heard(self, text: str, location: Any) -> None:
        if not any(known in text for known in ALLOWED):
            self.errors.append(
                f"{text} ({location.get('url', '')}:{location.get('lineNumber', '')})"
            )

    # Notebooks ----------------------------------------------------------------------------------------------------

    def write(self, cells: Sequence[str], name: str = "") -> str:
        """Write a notebook of code cells into the server's folder; its path there."""
        import nbformat

        path = f"{name or self.name}.ipynb"
        book = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(c) for c in cells]
        )
        book.metadata["kernelspec"] = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        nbformat.write(book, self.server.notebooks / path)
        return path

    def saved(self, name: str = "") -> dict[str, Any]:
        """The notebook as it is on disk."""
        return json.loads(
            (self.server.notebooks / f"{name or self.name}.ipynb").read_text()
        )

    def open(
        self,
        cells: Sequence[str] | None = None,
        name: str = "",
        kernel: bool = True,
        app: str = "lab/tree",
    ) -> LabPage:
        """Write (if cells are given) and open a notebook, and wait for its kernel (unless not `kernel`).

        app    "notebooks": in Notebook 7, which the same server serves
        """
        path = (
            self.write(cells, name)
            if cells is not None
            else f"{name or self.name}.ipynb"
        )
        self._app = app
        if self._loaded and app == "lab/tree":
            self._show(path)
            # the same test again: as a person who opens the page anew
            self._loaded = False
        else:
            heard = len(self.errors)
            self.raw.goto(
                f"{self.server.url}/{app}/{path}?reset&token={self.server.token}",
                timeout=180_000,
                wait_until="commit",
            )
            # of the page that was left: requests and sockets that leaving it cut
            del self.errors[heard:]
            self.raw.wait_for_load_state(timeout=180_000)
        self.until(
            f"!!window.jupyterapp?.shell?.currentWidget?.context?.path?.endsWith({json.dumps(path)})",
            180,
        )
        self._await(f"{CONTEXT}.ready")
        if kernel:
            self.wait_kernel()
        return self

    def _show(self, path: str) -> None:
        """In the page that is open, with the kernel of an earlier test if there is one."""
        kernel, self._kernel = self._kernel, None
        options = {"path": path} | ({"kernel": {"id": kernel}} if kernel else {})
        self._await(
            f"window.jupyterapp.commands.execute('docmanager:open', {json.dumps(options)})"
        )

    def _await(self, promise: str) -> None:
        """Not what it gives: all of JupyterLab hangs on a widget, and takes seconds to be sent here."""
        self.raw.evaluate(f"async () => {{ await {promise}; }}")

    def close_notebook(self) -> None:
        """Close it in this page, in which the next `open` then is: quicker than in a new page, as otherwise."""
        self.script(
            "for (const w of [...window.jupyterapp.shell.widgets('main')]) w.dispose()"
        )
        self._loaded = True

    def wait_kernel(self, seconds: float = 180.0) -> None:
        """Until a kernel exists, answered, is idle and connected (the label "Idle" is shown before there is one)."""
        self.until(f"!!{CONTEXT}.sessionContext.session?.kernel", seconds)
        kernel = f"{CONTEXT}.sessionContext.session.kernel"
        self._await(f"{kernel}.info")
        self.until(
            f"{kernel}.status === 'idle' && {kernel}.connectionStatus === 'connected'",
            seconds,
        )

    def run_all(self, seconds: float = 300.0, errors: bool = False) -> LabPage:
        """Run every cell to its end; a cell that raises fails the test unless `errors`."""
        return self._command("notebook:run-all-cells", seconds, errors)

    def run(self, source: str, seconds: float = 300.0, errors: bool = False) -> str:
        """Append a cell, run it, and give its text output."""
        self.raw.evaluate(
            """source => { const nb = window.jupyterapp.shell.currentWidget.content, cells = nb.model.sharedModel;
               cells.insertCell(cells.cells.length, {cell_type: 'code', source, metadata: {trusted: true}});
               nb.deselectAll(); nb.activeCellIndex = nb.widgets.length - 1; }""",
            source,
        )
        self._command("notebook:run-cell", seconds, errors)
        return self.output(-1)

    def _command(self, command: str, seconds: float, errors: bool) -> LabPage:
        self.raw.evaluate(
            """command => { window.jvRun = 'running';
               window.jupyterapp.commands.execute(command).then(() => { window.jvRun = 'done'; },
                                                                e => { window.jvRun = String(e); }); }""",
            command,
        )
        self.until(
            "window.jvRun !== 'running'",
            seconds,
            lambda: f"cells so far: {self.outputs()}",
        )
        wrong = (
            []
            if errors
            else [
                o
                for cell in self.outputs()
                for o in cell
                if o["output_type"] == "error"
            ]
        )
        assert not wrong, "a cell raised:\n" + "\n".join(
            plain("\n".join(o["traceback"])) for o in wrong
        )
        return self

    def outputs(self) -> list[list[dict[str, Any]]]:
        """The outputs of each cell, as the notebook holds them."""
        return self.raw.evaluate(
            "() => window.jupyterapp.shell.currentWidget.content.widgets.map(w => w.model.toJSON().outputs ?? [])"
        )

    def output(self, cell: int) -> str:
        """What a cell printed, or the text of what it returned."""
        text = []
        for o in self.outputs()[cell]:
            found = (
                o.get("text")
                or o.get("data", {}).get("text/plain")
                or "\n".join(o.get("traceback", []))
            )
            text.append(found if isinstance(found, str) else "".join(found))
        return plain("".join(text)).strip()

    def save(self) -> None:
        self._await(f"{CONTEXT}.save()")

    def shut_kernel(self) -> None:
        """Shut the notebook's kernel down, as a person does from the menu."""
        self._await(f"{CONTEXT}.sessionContext.shutdown()")

    # Looking and clicking -----------------------------------------------------------------------------------------

    def until(
        self,
        condition: str,
        seconds: float = 90.0,
        more: Callable[[], str] | None = None,
    ) -> None:
        """Wait until a JavaScript expression is true."""
        from playwright.sync_api import Error

        try:
            # not at every frame: the browser would draw for it
            self.raw.wait_for_function(
                f"() => {condition}", timeout=seconds * 1000, polling=100
            )
        except Error as e:
            told = f"\n{more()}" if more else ""
            raise AssertionError(
                f"not true after {seconds:g} s: {condition}\n{e}{told}"
            ) from e

    def wait(
        self, selector: str, seconds: float = 90.0, text: str | None = None
    ) -> Any:
        """Wait until an element is visible (and contains `text`); gives playwright's locator of the first."""
        found = self.raw.locator(selector)
        found = (found.filter(has_text=text) if text is not None else found).first
        found.wait_for(state="visible", timeout=seconds * 1000)
        return found

    def click(
        self, selector: str, seconds: float = 90.0, text: str | None = None
    ) -> None:
        self.wait(selector, seconds, text).click(timeout=seconds * 1000)

    def fill(self, selector: str, value: str, seconds: float = 90.0) -> None:
        """Put text into a field; fires its input event."""
        self.wait(selector, seconds).fill(value, timeout=seconds * 1000)

    def text(self, selector: str, seconds: float = 90.0) -> str:
        return self.wait(selector, seconds).inner_text(timeout=seconds * 1000)

    def count(self, selector: str) -> int:
        return self.raw.locator(selector).count()

    def data(self, selector: str, seconds: float = 90.0) -> dict[str, str]:
        """An element's dataset: counters and measured times of canvases."""
        return dict(self.wait(selector, seconds).evaluate("e => ({...e.dataset})"))

    def script(self, expression: str, argument: Any = None) -> Any:
        """Evaluate JavaScript in the page: an expression, or a function of one argument."""
        return self.raw.evaluate(expression, argument)

    def theme(self, name: str) -> None:
        """ "light" or "dark"."""
        full = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}[name]
        self._await(
            f"window.jupyterapp.commands.execute('apputils:change-theme', {{theme: {json.dumps(full)}}})"
        )
        self.until(f"document.body.dataset.jpThemeName === {json.dumps(full)}")

    def screenshot(
        self,
        path: str | Path,
        theme: str = "light",
        width: int = 1280,
        height: int = 900,
        of: str = "",
    ) -> Path:
        """A picture of the page, or of the element `of`, in one theme and width."""
        self.theme(theme)
        self.raw.set_viewport_size({"width": width, "height": height})
        # stylesheets of a theme are loaded on demand, and layout settles
        self.raw.wait_for_timeout(300)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        target = self.wait(of) if of else self.raw
        # all of it in sight: what is scrolled away would be missing from the picture
        if of:
            tall = int(target.bounding_box()["height"]) + 300
            self.raw.set_viewport_size({"width": width, "height": max(height, tall)})
            self.raw.wait_for_timeout(200)
            target.scroll_into_view_if_needed()
        target.screenshot(path=str(path))
        return path

    def cut(self, of: str, width: int = 700) -> list[str]:
        """In a page of this width: a panel's numbers, names and buttons that are wider than their room, and any text
        outside the panel that cannot be scrolled to.
        """
        before = self.raw.viewport_size
        self.raw.set_viewport_size({"width": width, "height": 900})
        self.raw.wait_for_timeout(300)  # layout settles
        found = self.wait(of).evaluate(
            """(root, names) => {
                 const scrolls = (e) => e !== root && (e.scrollLeft || /auto|scroll/.test(getComputedStyle(e).overflowX)
                   || (e.parentElement && e.parentElement !== root && scrolls(e.parentElement)));
                 const edge = root.getBoundingClientRect().right + 1;
                 const words = (e, why) => `${e.tagName} ${(e.innerText ?? e.textContent).slice(0, 60)}: ${why}`;
                 const tight = [...root.querySelectorAll(names)]
                   .filter((e) => e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1)
                   .map((e) => words(e, `${e.scrollWidth} > ${e.clientWidth}`));
                 const out = [...root.querySelectorAll("*")]
                   .filter((e) => !e.childElementCount && e.textContent.trim() && e.getClientRects().length)
                   .filter((e) => e.getBoundingClientRect().right > edge && !scrolls(e))
                   .map((e) => words(e, `ends ${Math.round(e.getBoundingClientRect().right - edge)} px outside`));
                 const collapsed = [...root.querySelectorAll(".jv-row .jv-leaf, .jv-row .jv-tensor, .jv-row .jv-name")]
                   .filter((e) => e.textContent.trim() && e.getClientRects().length && e.clientWidth < 60)
                   .map((e) => words(e, `collapsed to ${e.clientWidth} px`));
                 return [...tight, ...out, ...collapsed];
               }""",
            "[data-jv=headline], [data-jv=headline] *, [data-jv=fact], b, th, button, label, .jv-name",
        )
        self.raw.set_viewport_size(before)
        return found

    def hand_on(self) -> tuple[Any, str | None] | None:
        """Close the notebook, and give page and kernel, both tidied, for the next test; None if the page can't be used.

        A kernel that is gone, or busy, is not handed on.
        """
        for event, listener in self._listeners.items():
            self.raw.remove_listener(event, listener)
        try:
            if self._app != "lab/tree":
                raise AssertionError("the next test wants JupyterLab")
            self.raw.set_viewport_size(VIEWPORT)
            if self.script("document.body.dataset.jpThemeName") != "JupyterLab Light":
                self.theme("light")
            kernel = self.script(TIDIED, TIDY)
            self.close_notebook()
            self.server.end_kernels(but=kernel)
            if self.count(".jp-Dialog") or self.count(".jp-NotebookPanel"):
                raise AssertionError("something of this test is still in the page")
        except Exception:
            self.close()
            return None
        return self.raw, kernel

    def close(self) -> None:
        """End the notebook's kernel and close the page."""
        self.server.end_kernels()
        self.raw.close(run_before_unload=False)


def plain(text: str) -> str:
    """Without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
