"""Matplotlib figures that display in a notebook cell: as SVG in the page's own text colour, and as PNG."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jvlab._errors import MissingDependency
from jvlab.views._palette import NEUTRAL, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100
MOST = 300_000  # characters of an SVG; of a larger one the data is drawn as pixels
STYLE = ".jv-figure *{stroke-linejoin:round}.jv-figure+img{display:none}"
REFERENCE = re.compile(r'(\bid="|href="#|url\(#)')
SHORTER = (  # what matplotlib writes and a page does not need, in this order
    (re.compile(r"<!--.*?-->", re.DOTALL), ""),
    # it would style the whole page
    (re.compile(r"<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL), ""),
    (re.compile(r'<g id="[^"]*">'), "<g>"),
    (re.compile(r"(?<=\d\d\.\d\d)\d+(?=[\s\"])"), ""),
    (re.compile(r"\s+"), " "),
    (re.compile(r"(?<=>) (?=<)"), ""),
)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, without pyplot's global state."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as e:
        raise MissingDependency(
            "figures need matplotlib", remedy='pip install "jvlab[notebook]"'
        ) from e
    return _figure_class()(figsize=(width, height), layout="constrained")


@functools.cache
def _figure_class() -> Any:
    from matplotlib.figure import Figure

    class CellFigure(Figure):
        """Displays without pyplot: IPython draws plain Figures only after pyplot was imported."""

        def savefig(self, *args: Any, **options: Any) -> None:
            """As `Figure.savefig`, on a transparent background unless one is asked for."""
            for_any_theme(self)
            super().savefig(*args, **({"transparent": True} | options))

        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=DPI)
            return out.getvalue()

        def _repr_html_(self) -> str:
            """The SVG; and a PNG that its style hides, for pages that take SVG out (untrusted notebooks, GitHub)."""
            with _laid_out(self):
                picture = f"data:image/png;base64,{_small_png(self._repr_png_())}"
                return f'<div>{themed_svg(self)}<img alt="" src="{picture}"/></div>'

    return CellFigure


def themed_svg(figure: Figure) -> str:
    """The figure as SVG for a page: what frames the data has the page's own text colour, in any theme.

    Letters are outlines: a page's font would be wider or narrower than the room that they were given.
    """
    svg = _svg(figure)
    if len(svg) > MOST:
        with _data_as_pixels(figure):
            svg = _svg(figure)
    svg = svg[svg.index("<svg") :].replace(NEUTRAL.lower(), "currentColor")
    for pattern, instead in SHORTER:
        svg = pattern.sub(instead, svg)
    # several figures share one page
    svg = REFERENCE.sub(rf"\g<1>f{uuid.uuid4().hex[:8]}-", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    style = f"width:{figure.get_figwidth() * DPI:.0f}px;max-width:100%;height:auto;display:block"
    head = f'<svg class="jv-figure" role="img" {box[0]} style="{style}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return f"{head}<style>{STYLE}</style>{svg[svg.index('>') + 1 :].strip()}"


def _svg(figure: Figure) -> str:
    from matplotlib import rc_context

    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "path"}):
        figure.savefig(out, format="svg", dpi=2 * DPI, metadata=nothing)
    return out.getvalue()


@contextlib.contextmanager
def _laid_out(figure: Figure) -> Iterator[None]:
    """Place everything once, not at each drawing: that takes longer than to draw it."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")
    try:
        yield
    finally:
        if engine is not None:
            figure.set_layout_engine(engine)


@contextlib.contextmanager
def _data_as_pixels(figure: Figure) -> Iterator[None]:
    drawn = [a for ax in figure.axes for a in (*ax.lines, *ax.collections, *ax.patches)]
    before = [artist.get_rasterized() for artist in drawn]
    for artist in drawn:
        artist.set_rasterized(True)
    try:
        yield
    finally:
        for artist, was in zip(drawn, before, strict=True):
            artist.set_rasterized(was)


def _small_png(full: bytes) -> str:
    """A PNG with few colours, in base64."""
    from PIL import Image

    small = io.BytesIO()
    picture = Image.open(io.BytesIO(full)).quantize(48, Image.Quantize.FASTOCTREE)
    picture.save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def for_any_theme(figure: Figure) -> None:
    """Draw what frames the data in a grey that a light and a dark page both show; the data's colours stay."""
    from matplotlib.legend import Legend
    from matplotlib.spines import Spine
    from matplotlib.text import Text

    for ax in figure.axes:
        ax.tick_params(which="both", colors=NEUTRAL)
    every: Any = figure.findobj
    for spine in every(Spine):
        spine.set_edgecolor(NEUTRAL)
    for legend in every(Legend):
        legend.get_frame().set_facecolor("none")
    with_the_data = [text for ax in figure.axes for text in ax.texts]
    for text in every(Text):
        if text not in with_the_data:
            text.set_color(NEUTRAL)


# A plot as a description, and its drawing -----------------------------------------------------------------------------

EMPTY = "nothing yet"
FEW = 30  # points of a line that are also marked: a line alone does not show isolated ones
RED = SERIES[5]


@dataclass(frozen=True, eq=False)
class Series:
    """A line, marks, or one layer of stacked bars."""

    x: Any
    y: Any
    colour: Any
    label: str = ""
    # as matplotlib writes lines and marks: "-", "o-", "x"; with "|" at its end: stairs; or "bar"
    mark: str = "-"
    band: tuple[Any, Any] | None = None  # lower and upper edge around it
    hatch: str = ""
    width: float = 0.8  # of a bar
    texts: Sequence[str] = ()  # above the bars


@dataclass(frozen=True, eq=False)
class Plot:
    """One pair of axes. `empty` is written where no series has a number."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    empty: str = EMPTY
    whole: bool = False  # x counts steps or versions: no tick between two of them
    marks: Sequence[float] = ()  # skipped steps
    # a dashed line; red if it has a name, since it is an alarm
    limit: tuple[float, str] | None = None
    log: bool = False
    reach: tuple[float, float] | None = None  # of y
    legend: dict[str, Any] = field(default_factory=dict)


def dress(ax: Axes, plot: Plot) -> None:
    """Title, labels and grid."""
    ax.set_title(plot.title, fontsize=10, loc="left")
    ax.set_xlabel(plot.x, fontsize=9)
    ax.set_ylabel(plot.y, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def draw(ax: Axes, plot: Plot) -> None:
    """The plot by matplotlib."""
    from matplotlib.ticker import MaxNLocator

    dress(ax, plot)
    shown = [s for s in plot.series if np.isfinite(np.asarray(s.y, float)).any()]
    if not shown:
        blank(ax, plot.empty)
        return
    base: Any = 0
    for s in shown:
        if s.mark == "bar":
            bars = ax.bar(
                s.x,
                s.y,
                s.width,
                base,
                color=s.colour,
                edgecolor="white",
                linewidth=0 if s.hatch else 0.2,
                hatch=s.hatch or None,
                label=s.label,
            )
            base = base + s.y
            if len(s.texts):
                ax.bar_label(bars, s.texts, fontsize=8)
        else:
            _line(ax, s)
    for number, x in enumerate(plot.marks):
        label = "" if number else "skipped"
        ax.axvline(x, color=RED, linewidth=1, linestyle=":", label=label)
    if plot.limit is not None:
        at, label = plot.limit
        colour = RED if label else NEUTRAL
        ax.axhline(at, color=colour, linestyle="--", linewidth=1, label=label)
    if plot.log:
        ax.set_yscale("log")
    if plot.whole:
        steps = np.unique(np.concatenate([np.asarray(s.x, float) for s in shown]))
        if len(steps) == 1:
            ax.set_xlim(steps[0] - 1, steps[0] + 1)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if plot.reach is not None and plot.reach[1] > 0:
        ax.set_ylim(plot.reach)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(**({"fontsize": 8, "frameon": False, "loc": "best"} | plot.legend))


def _line(ax: Axes, s: Series) -> None:
    stairs = s.mark.endswith("|")
    few = s.mark == "-" and np.isfinite(s.y).sum() <= FEW
    ax.plot(
        s.x,
        s.y,
        "o-" if few else s.mark.removesuffix("|"),
        drawstyle="steps-post" if stairs else "default",
        color=s.colour,
        linewidth=1.2,
        markersize=3 if "-" in s.mark else 4,
        label=s.label,
    )
    if s.band is not None and "-" in s.mark:
        ax.fill_between(s.x, *s.band, color=s.colour, alpha=0.15, linewidth=0)
    elif s.band is not None:
        ax.vlines(s.x, *s.band, color=s.colour, linewidth=1.2)


def blank(ax: Axes, text: str = EMPTY) -> None:
    """A text instead of empty axes."""
    ax.set_xticks([])
    ax.set_yticks([])
    middle = {"ha": "center", "va": "center", "transform": ax.transAxes}
    ax.text(0.5, 0.5, text, color="#777777", fontsize=9, **middle)
