"""Which function draws which face of which class: classes by name, since most are of rooms above this one."""

from __future__ import annotations

# class → face → module of this room : what to call with the object and what it passes on
FACES: dict[str, dict[str, str]] = {
    # what a run leaves behind
    "Comparison": {"html": "_cards:comparison_html"},
    "Record": {
        "html": "_cards:facts_html",
        "run": "_record_plots:run_figure",
        "staleness": "_record_plots:staleness_figure",
        "throughput": "_record_plots:throughput_figure",
        "timeline": "_timeline:timeline_figure",
        "lanes": "_timeline:Timeline",
        "panel": "_run_view:RecordPanel.show",
    },
    "RolloutBatch": {
        "html": "_batch_view:batch_html",
        "panel": "_batch_view:BatchPanel.show",
    },
    # the trainer's
    "Packing": {"figure": "_batch_view:packing_figure"},
    "Policy": {"html": "_cards:facts_html"},
    "Run": {
        "text": "_run_view:run_text",
        "html": "_run_view:card",
        "comparison": "_record_plots:compare_figure",
        "panel": "_run_view:RunPanel.show",
        "card": "panels._live:show",
    },
    # from a tree to a verified version
    "CheckReport": {"text": "_sync_view:check_line", "html": "_sync_view:check_html"},
    "Explanation": {
        "html": "_mapping_view:explanation_html",
        "figure": "_mapping_view:mapping_figure",
    },
    "Link": {"html": "_sync_view:link_html"},
    "Mapping": {
        "line": "_mapping_view:mapping_line",
        "text": "_mapping_view:mapping_text",
        "html": "_mapping_view:mapping_html",
        "panel": "panels._inspector:InspectorPanel.show",
        "selection": "panels._inspector:select_everywhere",
    },
    "Meaning": {"html": "_sync_view:meaning_html"},
    "Stepper": {
        "html": "_sync_view:stepper_html",
        "panel": "_sync_view:StepperPanel.show",
    },
    "SyncReport": {"text": "_sync_view:sync_line", "html": "_sync_view:sync_html"},
    "TransferPlan": {
        "text": "_plan_view:plan_text",
        "html": "_plan_view:plan_html",
        "figure": "_plan_view:plan_figure",
        "panel": "_plan_view:PlanPanel.show",
    },
    "Values": {"html": "_mapping_view:values_html"},
    # what you hold
    "DeterminismReport": {"html": "_cards:report_html"},
    "Lab": {
        "html": "_cards:lab_html",
        "panel": "_cards:LabPanel.show",
        "end": "panels._live:make_static",
    },
    "Pool": {
        "text": "_cards:pool_line",
        "html": "_cards:pool_html",
        "panel": "_cards:PoolPanel.show",
    },
    "Session": {"html": "_cards:session_html"},
    "Sessions": {"html": "_cards:sessions_html"},
    # is it right, why not, what if
    "Bisection": {"html": "_sync_view:bisection_html"},
    "Forecast": {"html": "_forecast_view:forecast_html"},
    "ForecastTable": {
        "text": "_forecast_view:table_text",
        "html": "_forecast_view:table_html",
    },
    "WhatIf": {
        "html": "_forecast_view:whatif_html",
        "figure": "_forecast_view:whatif_figure",
        "panel": "_forecast_view:ForecastPanel.show",
    },
}
