"""Pictures of every panel that needs no engine, in a real JupyterLab: light, dark, and in a page of 700 pixels.

python .ci/shots.py FOLDER               all
python .ci/shots.py FOLDER run rollout   some

Panels of engines (the lab's, the stepper of a real sync): JVLAB_SHOTS=FOLDER pytest tests/browser.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402

from tests.browser.lab_page import CHROMIUM_FLAGS, VIEWPORT, LabPage, LabServer  # noqa: E402

# panel: (its selector, what is in the page once it is drawn, the cell that shows it)
PANELS = {
    "run": (
        ".jv-run-panel",
        '.jv-curves[data-rows="120"]',
        "from jvlab.record._record import Record\nfrom tests.record.synthetic import made_up\n"
        "panel = Record.of(made_up(120, staleness=1)).panel(compare=Record.of(made_up(80, seed=3)))\npanel.smooth(20)",
    ),
    "run-empty": (
        ".jv-run-panel",
        ".jv-run-panel [data-jv=headline]",
        "from jvlab.record._record import Record\nfrom tests.record.synthetic import made_up\n"
        "panel = Record.of(made_up(0)).panel()",
    ),
    "rollout": (
        ".jv-rollout",
        ".jv-rollout .jv-sample",
        "import jvlab as jv\nfrom tests.views.batches import compared, make_batch\n"
        "batch = compared(make_batch(jv.models.tiny('llama'), evil=False))\n"
        "panel = batch.with_rewards([{'form': 0.25, 'right': s.reward} for s in batch]).panel()\npanel.diff(1)",
    ),
    "timeline": (
        ".jv-timeline-panel",
        ".jv-timeline .jv-lanes[data-paints]",
        "from jvlab.views._timeline import Timeline\nfrom jvlab.record._record import Record\n"
        "from tests.record.synthetic import made_up\npanel = Timeline(Record.of(made_up(30, staleness=1))).panel()",
    ),
    "plan": (
        ".jv-plan",
        ".jv-plan-heat rect",
        "from tests.views.mapping_world import *\npanel = small_mapping(2).plan.panel()",
    ),
    "mapping": (
        ".jv-inspector",
        ".jv-inspector .jv-row",
        "from tests.views.mapping_world import *\npanel = small_mapping(4).panel()",
    ),
    "stepper": (
        ".jv-stepper",
        ".jv-stepper .jv-tensors",
        "from tests.views.panels.fake_stepper import stepper\nmade = stepper()\npanel = made.panel()",
    ),
    "whatif": (
        ".jv-forecast",
        ".jv-forecast-result",
        "import jvlab as jv\nfrom tests.analysis.forecast.synthetic import record, setting\n"
        "panel = jv.whatif(record(setting(4, 4, 48)), record(setting(8, 4, 64, 1))).panel()",
    ),
}
LOOKS = (("light", 1280), ("dark", 1280), ("light", 700))


def browser_path() -> str:
    spec = importlib.util.spec_from_file_location(
        "ci_browser", ROOT / ".ci" / "browser.py"
    )
    assert spec is not None
    assert spec.loader is not None
    finder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(finder)
    found = finder.find()
    if found is None:
        raise SystemExit(f"no browser: {finder.REMEDY}")
    return found


def main(folder: Path, wanted: list[str]) -> int:
    from playwright.sync_api import sync_playwright

    server = LabServer(Path(tempfile.mkdtemp(prefix="jvlab-shots-")))
    try:
        server.wait()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=browser_path(), args=CHROMIUM_FLAGS
            )
            context = browser.new_context(viewport=VIEWPORT)
            for name, (panel, drawn, cell) in PANELS.items():
                if not wanted or name in wanted:
                    shoot(
                        LabPage(server, context, name),
                        folder,
                        name,
                        (panel, drawn, cell),
                    )
            browser.close()
    finally:
        server.close()
    total = sum(path.stat().st_size for path in folder.glob("*.png"))
    print(f"{total / 1024:.0f} KB in {folder}")
    return 0


def shoot(page: LabPage, folder: Path, name: str, what: tuple[str, str, str]) -> None:
    panel, drawn, cell = what
    page.open([cell]).run_all()
    page.wait(drawn)
    page.raw.wait_for_timeout(1000)
    for theme, width in LOOKS:
        path = page.screenshot(
            folder / f"{name}-{theme}-{width}.png", theme, width, of=panel
        )
        Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(
            path, optimize=True
        )
    cut = page.cut(panel)
    print(f"{name}: {cut or 'nothing is cut at 700 px'}", flush=True)
    page.theme("light")
    page.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
