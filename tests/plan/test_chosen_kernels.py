"""The kernels that plans name for each GPU: those of a table that a change rewrites."""

from __future__ import annotations

import difflib

from chosen_kernels import FILE, MORE, OTHERS, PIPELINES, RECIPES, table

from fuser.plan.devices import DEVICES


def test_plans_name_the_kernels_of_the_table() -> None:
    found, expected = table(), FILE.read_text(encoding="utf-8")
    changed = difflib.unified_diff(expected.splitlines(), found.splitlines(), "table", "plans", n=2)
    assert found == expected, (
        "Plans differ from the table. If the change is meant, run "
        "`python tests/cases/chosen_kernels.py` and review the difference:\n" + "\n".join(changed)
    )


def test_the_table_has_each_pipeline_recipe_and_gpu_once() -> None:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    headings = [line for line in lines if not line.startswith(" ")]
    assert headings == [
        f"{pipeline}; recipe {recipe}"
        for pipeline in PIPELINES
        for recipe in RECIPES
        if recipe in OTHERS.get(pipeline, RECIPES)
    ]
    named = [line.strip().split(", ") for line in lines if line.startswith("  ") and line[2] != " "]
    names = [name for each in named for name in each]
    assert sorted(names) == sorted([*DEVICES, *MORE] * len(headings))
