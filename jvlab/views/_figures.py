"""Matplotlib figures that display in a notebook cell."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

from jvlab._errors import MissingDependency

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

        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=DPI)
            return out.getvalue()

    return CellFigure
