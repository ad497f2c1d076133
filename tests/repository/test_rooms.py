"""The walls of the house: names that lead from the core into a wing, or into a product."""

from __future__ import annotations

from collections import Counter

import house
import pytest
import rooms
from rooms import LIBRARY, ROOMS, Name, room_of

WINGS = LIBRARY.parent / "docs" / "dev" / "wings"

LEFT: dict[tuple[str, str], int] = {}
"""How many names still lead from a room into one that it may not know. A number only falls."""


def test_no_name_leads_through_a_wall_but_those_that_are_left() -> None:
    forbidden = [name for name in rooms.names(rooms.sources()) if name.is_forbidden]
    counts = Counter(tuple(room.name for room in name.rooms) for name in forbidden)
    assert counts == LEFT, [name for name in forbidden if counts != LEFT]


def test_a_class_name_is_that_of_one_class_but_for_layers_that_are_named_as_their_ops() -> None:
    files = house.sources(LIBRARY.parent)
    assert house.shared_class_names(files) == ["GroupedLinear", "Linear"]


def test_every_place_of_a_room_is_there_and_has_files_of_its_own() -> None:
    owners = Counter(room_of(path).name for path in rooms.sources())
    for room in ROOMS:
        assert owners[room.name], room.name
        for place in room.places:
            path = LIBRARY / (place if place.endswith("/") else f"{place}.py")
            assert path.exists(), place


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("op/basic.py", "core"),
        ("report/text.py", "core"),
        ("report/layout.py", "pictures"),
        ("modules/layer.py", "layers"),
        ("modules/decoder.py", "model plans"),
        ("testing/doctor.py", "doctor"),
        ("testing/check.py", "checks"),
    ],
)
def test_a_file_is_in_the_room_of_the_longest_place_that_has_it(path: str, room: str) -> None:
    assert room_of(path).name == room


@pytest.mark.parametrize(
    ("source", "target", "is_lazy", "is_forbidden"),
    [
        ("op/basic.py", "moe/router.py", False, True),
        ("op/basic.py", "moe/router.py", True, True),  # the core knows no wing, also not later
        ("moe/router.py", "op/basic.py", False, False),
        ("moe/router.py", "modules/layer.py", False, False),
        ("moe/router.py", "te/names.py", False, True),
        ("plan/plan.py", "report/draw.py", False, True),
        ("plan/plan.py", "report/draw.py", True, False),
        ("__main__.py", "demo/train_lm.py", False, False),
        ("te/names.py", "te/tensors.py", False, False),
    ],
)
def test_what_leads_where_it_should_not(
    source: str, target: str, is_lazy: bool, is_forbidden: bool
) -> None:
    assert Name(source, 1, target, "f", is_lazy).is_forbidden == is_forbidden


def test_a_name_is_of_the_file_that_defines_it() -> None:
    texts = {
        "op/basic.py": "from fuser.moe import route\n",
        "moe/__init__.py": "from fuser.moe.router import route\n",
        "moe/router.py": "def route():\n    from fuser.report.draw import draw\n",
        "report/draw.py": "draw = 1\n",
    }
    assert [*rooms.names(texts)] == [
        Name("op/basic.py", 1, "moe/router.py", "route", False),
        Name("moe/router.py", 2, "report/draw.py", "draw", True),
    ]


def test_a_room_prints_its_files_with_what_each_is_for() -> None:
    texts = {"moe/router.py": '"""Routers: who goes\n    where.\n\nMore."""\n', "op/basic.py": ""}
    assert [line.split(None, 1) for line in rooms.files_of("experts", texts)] == [
        ["moe/router.py", "Routers: who goes where."]
    ]


def test_every_wing_has_a_page() -> None:
    pages = {path.stem.lower().replace("_", " ") for path in WINGS.glob("*.md")}
    assert pages == {"readme", *(room.name.lower() for room in ROOMS if room.kind == "wing")}
