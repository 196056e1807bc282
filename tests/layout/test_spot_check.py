"""A plan that is consistent in itself, but not the plan of these rules and ranks, is refused given both."""

from __future__ import annotations

import dataclasses

import pytest

from jvlab._errors import CoverageError
from jvlab.layout._compile import compile_plan
from jvlab.layout._proof import prove
from jvlab.layout._types import Note
from tests.layout.plan_world import square


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_transposed_square_is_not_the_plan_of_these_rules(
    transposed: bool, tp: int, halves: bool
) -> None:
    world, other = (
        square(transposed=transposed, tp=tp, halves=halves),
        square(transposed=not transposed, tp=tp),
    )
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    prove(plan)
    prove(plan, world.bindings, world.layouts)
    with pytest.raises(
        CoverageError, match=r"puts another there|does not send it there"
    ):
        prove(plan, other.bindings, other.layouts)


@pytest.mark.parametrize(("field", "value"), [("add", 1.0), ("cast", "bfloat16")])
def test_another_law_of_values_is_refused(field: str, value: object) -> None:
    world = square(transposed=False, tp=2)
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    other = dataclasses.replace(
        plan,
        transforms=tuple(
            dataclasses.replace(x, **{field: value}) for x in plan.transforms
        ),
    )
    prove(other)
    with pytest.raises(CoverageError, match="changes its value by another transform"):
        prove(other, world.bindings, world.layouts)


def test_rows_shifted_into_padding_need_the_inputs_to_be_seen() -> None:
    world = square(transposed=False)
    (loader,) = world.loaders
    loader.parameters[0] = dataclasses.replace(loader.parameters[0], shape=(7, 6))
    loader.padding.append(Note("p", "the loader fills them with 0", 6, "constant"))
    plan = compile_plan(world.leaves, world.bindings, world.layouts)
    shifted = dataclasses.replace(plan, member_dst=plan.member_dst + 6)
    # as its docstring says: the count of padding is all that a plan knows by itself
    prove(shifted)
    with pytest.raises(
        CoverageError, match=r"does not send it there|puts another there"
    ):
        prove(shifted, world.bindings, world.layouts)
