"""Registers the panels of objects of lower rooms in `jvlab._faces`."""

from __future__ import annotations

from jvlab import _faces
from jvlab.layout._plan import TransferPlan
from jvlab.record._batch import RolloutBatch
from jvlab.record._record import Record
from jvlab.views.panels._batch_panel import show_batch
from jvlab.views.panels._dashboard import show_record
from jvlab.views.panels._plan_panel import show_plan

_faces.panel.register(TransferPlan, show_plan)
_faces.panel.register(RolloutBatch, show_batch)
_faces.panel.register(Record, show_record)
