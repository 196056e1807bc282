"""Registers the views of objects of lower rooms in `jvlab._faces`."""

from __future__ import annotations

from jvlab import _faces
from jvlab.layout._plan import TransferPlan
from jvlab.record._batch import RolloutBatch
from jvlab.views._batch_view import batch_html
from jvlab.views._plan_view import plan_figure, plan_html, plan_text

_faces.text.register(TransferPlan, plan_text)
_faces.html.register(TransferPlan, plan_html)
_faces.figure.register(TransferPlan, plan_figure)
_faces.html.register(RolloutBatch, batch_html)
