"""A library without a wing: which files go with it, and what its packages say of their names."""

from __future__ import annotations

from typing import Any

import pytest
import wing_out

TEXTS = {
    "__init__.py": "from fuser import moe\nfrom fuser.op import a, route\n__all__ = ['a', 'moe']\n",
    "op/__init__.py": "from fuser.moe.router import route\nfrom fuser.op.basic import a\n",
    "op/basic.py": "a = 1\n",
    "moe/__init__.py": "from fuser.moe.router import route\n",
    "moe/router.py": "from fuser.op.basic import a\nroute = 1\n",
    "modules/layer.py": "from fuser.moe import route\n",
    "modules/later.py": "def f():\n    from fuser.moe import route\n",
}


def test_files_that_import_a_lost_one_are_lost_too() -> None:
    lost = {"moe/__init__.py": "experts", "moe/router.py": "experts", "modules/layer.py": "layers"}
    assert wing_out.lost_files("experts", TEXTS) == lost


def test_a_core_that_imports_the_wing_is_named() -> None:
    texts = {**TEXTS, "op/basic.py": "from fuser.moe.router import route\n"}
    with pytest.raises(SystemExit, match=r"the core imports experts: op/basic\.py\."):
        wing_out.lost_files("experts", texts)
    with pytest.raises(SystemExit, match="no wing or product 'core'"):
        wing_out.lost_files("core", TEXTS)


def test_a_package_says_of_which_wing_a_name_is_that_it_lacks() -> None:
    lost = wing_out.lost_files("experts", TEXTS)
    text = wing_out.without_names("__init__.py", TEXTS, lost)
    package: dict[str, Any] = {"__name__": "fuser"}
    exec(text.replace("from fuser.op import a", "a = 1"), package)
    assert (package["a"], package["__all__"]) == (1, ["a"])
    for name, said in (
        ("moe", "fuser.moe is of experts, which is not here."),
        ("route", "fuser.route is of experts, which is not here."),
        ("other", "module 'fuser' has no attribute 'other'"),
    ):
        with pytest.raises(AttributeError, match=said):
            package["__getattr__"](name)
    assert wing_out.without_names("op/__init__.py", TEXTS, {}) == TEXTS["op/__init__.py"]
