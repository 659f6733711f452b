"""Plans, estimates, projected memory and lists of steps are those that were recorded."""

from __future__ import annotations

import json

from golden import RECORD, differences, measured


def test_plans_and_lists_are_as_recorded():
    """A change that is meant to change them records them anew, and shows in the record's diff what it changes."""
    found = differences(measured(), json.loads(RECORD.read_text()))
    assert not found, "\n".join(["if this is meant, record it: python -m tests.golden --write", *found])


def test_all_differences_are_told():
    before = {"x": {"method": "summa", "seconds": 1.23}, "y": {"bytes": 3}}
    assert differences(before, before) == []
    assert differences({"x": {"method": "summa", "seconds": 1.24}, "y": {"bytes": 3}}, before) == []
    now = {"x": {"method": "local", "seconds": 1.3, "hash": "a"}, "z": {}}
    assert differences(now, before) == [
        "y: gone", "z: new", "x: hash None -> a", "x: method summa -> local", "x: seconds 1.23 -> 1.3",
    ]  # fmt: skip
