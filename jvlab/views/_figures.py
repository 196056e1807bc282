"""Matplotlib figures that display in a notebook cell."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

from jvlab._errors import MissingDependency
from jvlab.views._palette import NEUTRAL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 100


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, without pyplot's global state."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as e:
        raise MissingDependency("figures need matplotlib", remedy='pip install "jvlab[notebook]"') from e
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

    return CellFigure


def for_any_theme(figure: Figure) -> None:
    """Draw what frames the data in a grey that a light and a dark page both show; the data's colours stay."""
    from matplotlib.text import Text

    texts: list[Any] = [*figure.texts]
    for title in ("_suptitle", "_supxlabel", "_supylabel"):
        texts += [found] if (found := getattr(figure, title, None)) is not None else []
    legends: list[Any] = [*figure.legends]
    for ax in figure.axes:
        written = set(ax.texts)  # with the data; the axes' other texts are its titles, left, centre and right
        texts += [child for child in ax.get_children() if isinstance(child, Text) and child not in written]
        texts += [ax.xaxis.label, ax.yaxis.label, ax.xaxis.offsetText, ax.yaxis.offsetText]
        legends += [found] if (found := ax.get_legend()) is not None else []
        ax.tick_params(which="both", colors=NEUTRAL)
        for spine in ax.spines.values():
            spine.set_edgecolor(NEUTRAL)
    for legend in legends:
        legend.get_frame().set_facecolor("none")
        texts += [*legend.get_texts(), legend.get_title()]
    for text in texts:
        text.set_color(NEUTRAL)
