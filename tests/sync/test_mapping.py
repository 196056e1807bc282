"""What a person sees of a mapping and a plan: stable text, safe HTML, the whole way of one tensor, drawings."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from jvlab._errors import ConfigError
from jvlab.layout._compile import compile_plan
from jvlab.layout._tree import MeshSpec
from jvlab.layout._types import Note
from jvlab.sync._compile_tree import rank_runs
from jvlab.sync._mapping import Mapping
from jvlab.views._mapping_view import MAX_ROWS, draw, sends
from jvlab.views._plan_view import plan_lines, plan_summary
from tests.layout.plan_world import Size, World, transformer


def build(size: Size | None = None, mesh: str = "fsdp=3,tp=2") -> tuple[World, Mapping]:
    world = transformer(
        World(MeshSpec.parse(mesh), 2, "bfloat16"),
        size or Size(),
        layout="einsum",
        rotary=True,
    )
    bindings = [
        dataclasses.replace(b, rule=f"{b.leaf} -> {b.tensor}", reason="said so")
        for b in world.bindings
    ]
    plan = compile_plan(world.leaves, bindings, world.layouts, title="tiny")
    return world, Mapping(plan, bindings, world.layouts)


class Balanced(HTMLParser):
    """Every tag that opens closes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags(html: str) -> list[str]:
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    return parser.seen


def test_rows_and_summary() -> None:
    _, mapping = build()
    k = next(r for r in mapping.rows if r.tensor == "model.layers.1.k_proj.weight")
    assert (k.leaf, k.parameter, k.ranks) == (
        "layers.1.k",
        "model.layers.1.qkv_proj.weight",
        (0, 1),
    )
    assert (k.leaf_dtype, k.dtype, k.status, k.nbytes) == (
        "float32",
        "bfloat16",
        "cast",
        12 * 12 * 2,
    )
    summary = mapping.summary()
    assert summary["bytes"] == mapping.plan.total_bytes
    assert summary["leaves"] == len(mapping.plan.leaves)
    assert rank_runs([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_text_is_stable_and_says_what_matters() -> None:
    (_, a), (_, b) = build(), build()
    assert repr(a) == repr(b)
    assert repr(a.plan) == repr(b.plan)
    assert repr(a).startswith(f"Mapping({len(a.plan.leaves)} leaves → ")
    assert "6 devices → 1 × 2 ranks" in repr(a.plan)


def test_html_is_balanced_escaped_and_needs_nothing_from_outside() -> None:
    _, mapping = build()
    bindings = [
        dataclasses.replace(b, rule="<script>alert('x')</script>", reason='"><b>')
        for b in mapping.bindings
    ]
    html = Mapping(mapping.plan, bindings, mapping._layouts)._repr_html_()
    seen = tags(html)
    assert "script" not in seen
    assert seen.count("b") == 1  # our own heading; the planted one is text
    assert seen.count("tr") == 1 + len(mapping.rows)
    assert "input" in seen
    for word in ("http://", "https://", "src=", "<link"):
        assert word not in html
    tags(mapping.plan._repr_html_())


def test_thousands_of_rows_stay_small() -> None:
    _, mapping = build()
    many = Mapping(mapping.plan, mapping.bindings * 400, mapping._layouts)
    assert len(many.rows) > 5 * MAX_ROWS
    html = many._repr_html_()
    assert tags(html).count("tr") == 1 + MAX_ROWS
    assert "more rows are not shown" in html
    assert len(html) < 2_000_000


def test_explain_tells_the_whole_way() -> None:
    world, mapping = build()
    text = str(mapping.explain("layers.1.k"))
    for part in (
        "layers.1.k  float32[12, 2, 6]",
        "cut into 6 pieces",
        "model.layers.1.k_proj.weight [12, 12]",
        "said so",
        "model.layers.1.qkv_proj.weight on rank 0-1",
        "rank 0 takes 144 bytes",
        "rank 1 takes 144 bytes",
    ):
        assert part in text, part
    assert str(mapping.explain("model.layers.1.k_proj.weight")) == text
    vocab = str(mapping.explain("embed"))
    assert "padding: vocabulary padding" in vocab
    assert sum(sends(mapping.plan, "layers.1.k").values()) == 288
    assert {d for d, _ in sends(mapping.plan, "layers.1.k")} == set(range(6))
    assert len(world.leaves) == len(mapping.plan.leaves)


def test_names_that_mean_nothing_or_too_much() -> None:
    _, mapping = build()
    with pytest.raises(ConfigError, match=r"matches \d+ leaves"):
        mapping.explain("layers.1")
    with pytest.raises(ConfigError, match="no leaf") as caught:
        mapping.explain("layers.1.kk")
    assert "layers.1.k" in caught.value.remedy


def test_drawings_cover_both_sides() -> None:
    _, mapping = build()
    drawing = draw(mapping.plan, "layers.0.o")
    assert sum(r.w * r.h for r in drawing.source) == pytest.approx(1)
    assert [rank for rank, _, _ in drawing.targets] == [0, 1]
    for _, _, rects in drawing.targets:
        # o_proj is this leaf alone
        assert sum(r.w * r.h for r in rects) == pytest.approx(1)
    html = mapping.explain("layers.0.o")._repr_html_()
    tags(html)
    svg = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    rects = [e for e in svg.iter() if e.tag.endswith("rect")]
    # and three frames
    assert (
        len(rects)
        == len(drawing.source) + sum(len(r) for _, _, r in drawing.targets) + 3
    )


def test_figures() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    _, mapping = build()
    figure = mapping.figure("layers.0.q")
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 3
    heat = mapping.plan.plot()
    assert isinstance(heat, Figure)
    grid = heat.axes[0].images[0].get_array()
    assert grid is not None
    assert grid.shape == (6, 2)
    assert float(grid.sum()) * 1e6 == pytest.approx(mapping.plan.total_bytes)


def test_replicas_take_turns_among_the_copies_of_a_leaf() -> None:
    """Four copies of one leaf feed four replicas: each device sends once, and every view says so."""
    world = World(MeshSpec.parse("dp=4"), 1)
    world.leaf("w", (6, 6))
    tensor = world.tensor("t", (6, 6))
    world.bind("w", "t", [(6, 0, 1, 0, 1), (6, 1, 1, 1, 1)])
    whole = (slice(None), slice(None))
    world.loaders[0].copy(tensor, whole, world.loaders[0].parameter("t", (6, 6)), whole)
    plan = compile_plan(world.leaves, world.bindings, world.layouts, replicas=4)
    sent = {d: sum(plan.link(d, 0, r).total_bytes for r in range(4)) for d in range(4)}
    assert sent == dict.fromkeys(range(4), 144)
    assert plan.predict(1) == pytest.approx(144e-9)
    table = plan.all_links
    assert sorted(
        zip(table.replica.tolist(), table.device.tolist(), strict=True)
    ) == sorted((r, d) for r in range(4) for d in range(4) if len(plan.link(d, 0, r)))
    summary = plan_summary(plan)
    assert (summary["links"], summary["bytes"], summary["bytes_per_replica"]) == (
        4,
        576,
        144,
    )
    assert (summary["device_bytes_max"], summary["predicted_s"]) == (
        144,
        plan.predict(),
    )
    assert "device 3 → replica" in "\n".join(plan_lines(plan, [1]))
    assert "<td" in plan._repr_html_()
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    heat = plan.plot()
    assert isinstance(heat, Figure)
    grid = heat.axes[0].images[0].get_array()
    assert grid is not None
    assert (grid * 1e6).sum(axis=1).tolist() == pytest.approx([144] * 4)
    assert (grid * 1e6).sum(axis=0).tolist() == pytest.approx([144] * 4)
    assert "4 replicas" in heat.axes[0].get_title()


def test_staged_and_opaque_are_named() -> None:
    world, mapping = build(Size(layers=1))
    layouts = [
        dataclasses.replace(
            x, repacked=(Note("model.layers.0.o_proj.weight", "packed for oneDNN"),)
        )
        for x in world.layouts
    ]
    plan = compile_plan(world.leaves, world.bindings, layouts)
    staged = Mapping(plan, world.bindings, layouts)
    assert {r.leaf for r in staged.rows if r.status == "staged"} == {"layers.0.o"}
    assert "packed for oneDNN" in str(staged.explain("layers.0.o"))
    assert "1 staged" in repr(staged)
    assert mapping.summary()["staged"] == 0
