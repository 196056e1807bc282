"""`jvlab.__all__` and the table of where names live say the same."""

from __future__ import annotations

import jvlab


def test_all_is_what_can_be_had():
    assert sorted(jvlab.__all__) == sorted([*jvlab._WHERE, *jvlab._MODULES])
