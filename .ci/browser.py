"""Brings the browser of the tests in tests/browser: `python .ci/browser.py` finds one, or installs one where it may.

Takes the first that runs: $JVLAB_BROWSER, a Chromium or Chrome on this machine, playwright's own. If there is none:
Debian's package (as root), else playwright's download. If that fails too it prints the remedy and exits 0: the browser
tests are then skipped, loudly, and everything else is tested.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
INSTALL_SECONDS = 300
REMEDY = (
    "install one: apt-get install chromium (Debian), or .venv/bin/python -m playwright install --with-deps chromium, "
    "or set JVLAB_BROWSER to the path of a Chromium or Chrome"
)


def runs(path: str) -> bool:
    """Whether it starts: Ubuntu's `chromium-browser`, say, may be a stub that only tells one to install a snap."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and bool(done.stdout.strip())


def playwrights_own() -> str | None:
    """Where playwright keeps its own Chromium, if it was downloaded."""
    code = (
        "from playwright.sync_api import sync_playwright\n"
        "with sync_playwright() as p: print(p.chromium.executable_path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    path = done.stdout.strip()
    return path if done.returncode == 0 and path and Path(path).exists() else None


def find() -> str | None:
    """A browser that runs, or None."""
    named = os.environ.get("JVLAB_BROWSER")
    if named:
        # what was asked for, or nothing: never another one in silence
        return named if runs(named) else None
    for candidate in (*map(shutil.which, NAMES), *PLACES):
        if candidate and Path(candidate).exists() and runs(candidate):
            return candidate
    own = playwrights_own()
    return own if own and runs(own) else None


def install() -> None:
    """Debian's package where that is possible, else playwright's download."""
    if os.environ.get("JVLAB_BROWSER"):
        return
    if hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        settings = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        quiet = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.STDOUT,
            "env": settings,
        }
        print("browser for the tests: apt-get install chromium ...", flush=True)
        # The lists of an image may be empty or old, so they come first; a mirror that fails must not stop the install.
        # a page without any font has no width
        packages = ["chromium", "fonts-liberation"]
        for words in (
            ["update", "-q"],
            ["install", "-y", "-q", "--no-install-recommends", *packages],
        ):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["apt-get", *words], timeout=INSTALL_SECONDS, **quiet)
        if find():
            return
    print("browser for the tests: playwright install chromium ...", flush=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        command = [sys.executable, "-m", "playwright", "install", "chromium"]
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=INSTALL_SECONDS)


def main() -> int:
    if not find():
        install()
    found = find()
    if found:
        print(f"browser for the tests: {found}")
    else:
        print(
            f"no browser: the tests in tests/browser will be skipped\n  → {REMEDY}",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
