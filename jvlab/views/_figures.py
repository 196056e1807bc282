"""Matplotlib figures that display in a notebook cell: as SVG in the page's own text colour, and as PNG."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import re
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jvlab._errors import MissingDependency
from jvlab.views._palette import NEUTRAL

if TYPE_CHECKING:
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
    with rc_context({"svg.fonttype": "path"}):
        figure.savefig(
            out,
            format="svg",
            dpi=2 * DPI,
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
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
    drawn = [
        artist
        for ax in figure.axes
        for artist in (*ax.lines, *ax.collections, *ax.patches)
    ]
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
    Image.open(io.BytesIO(full)).quantize(48, Image.Quantize.FASTOCTREE).save(
        small, "png", optimize=True
    )
    return base64.b64encode(small.getvalue()).decode()


def for_any_theme(figure: Figure) -> None:
    """Draw what frames the data in a grey that a light and a dark page both show; the data's colours stay."""
    from matplotlib.text import Text

    texts: list[Any] = [*figure.texts]
    for title in ("_suptitle", "_supxlabel", "_supylabel"):
        texts += [found] if (found := getattr(figure, title, None)) is not None else []
    legends: list[Any] = [*figure.legends]
    for ax in figure.axes:
        # with the data; the axes' other texts are its titles, left, centre and right
        written = set(ax.texts)
        texts += [
            child
            for child in ax.get_children()
            if isinstance(child, Text) and child not in written
        ]
        texts += [
            ax.xaxis.label,
            ax.yaxis.label,
            ax.xaxis.offsetText,
            ax.yaxis.offsetText,
        ]
        legends += [found] if (found := ax.get_legend()) is not None else []
        ax.tick_params(which="both", colors=NEUTRAL)
        for spine in ax.spines.values():
            spine.set_edgecolor(NEUTRAL)
    for legend in legends:
        legend.get_frame().set_facecolor("none")
        texts += [*legend.get_texts(), legend.get_title()]
    for text in texts:
        text.set_color(NEUTRAL)
