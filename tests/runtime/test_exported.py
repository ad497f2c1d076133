"""Pipelines in torch.export: the bits of the model, in this process and in a fresh one."""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
import zlib
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from fresh import python
from said import said
from test_compiled import (
    CURRENT,
    DELAYED,
    MXFP8,
    WIDTH,
    Blocks,
    _nothing_compiled_yet,
    assert_equal,
    rows,
    scaled,
    step,
    under,
)
from test_compiled_experts import Layer

import fuser
from fuser import recipe as recipes
from fuser.errors import StateError
from fuser.runtime import compiled, exported

__all__ = ["_nothing_compiled_yet"]  # the fixture
pytestmark = pytest.mark.filterwarnings("ignore:.* is emulated")

MODELS: dict[str, Any] = {"blocks": Blocks, "experts": lambda: Layer("ops")}
FRESH = """
import sys, warnings, torch, fuser
warnings.simplefilter("ignore")
for folder in sys.argv[1:]:
    program = torch.export.load(f"{folder}/program.pt2").module()
    for x, expected in torch.load(f"{folder}/pairs.pt"):
        y = program(x)
        assert torch.equal(y[0] if isinstance(y, tuple) else y, expected), folder
"""


def export(model: Any, x: torch.Tensor, rows: Any = None, *, strict: bool = False) -> Any:
    sizes = None if rows is None else ({0: rows},)
    return torch.export.export(model, (x,), dynamic_shapes=sizes, strict=strict)


Pairs: TypeAlias = "list[tuple[torch.Tensor, torch.Tensor]]"


def saved(folder: Path, name: str, recipe: Any, *, is_dynamic: bool, strict: bool) -> Pairs:
    """Export a model to a folder; inputs, and what the model returns for them."""
    model, pairs = MODELS[name](), []
    with torch.no_grad(), under(recipe):
        # Under MXFP8 torch asks for whole blocks, if it saw whole ones.
        blocks = 32 * torch.export.Dim("blocks", min=1, max=128)
        sizes = blocks if recipe is MXFP8 else torch.export.Dim("tokens", min=2, max=4096)
        program = export(model, rows(64), sizes if is_dynamic else None, strict=strict)
        for count in (64, 32, 128) if is_dynamic else (64,):
            y = model(rows(count))
            pairs.append((rows(count), y[0] if isinstance(y, tuple) else y))
    folder.mkdir(exist_ok=True)
    torch.export.save(program, folder / "program.pt2")
    torch.save(pairs, folder / "pairs.pt")
    return pairs


@pytest.mark.sampled
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("recipe", [None, CURRENT, MXFP8], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_program_has_the_bits_of_the_model(
    name: str, recipe: Any, is_dynamic: bool, strict: bool, tmp_path: Path
) -> None:
    """And the recipe of the export: no autocast is entered then."""
    pairs = saved(tmp_path, name, recipe, is_dynamic=is_dynamic, strict=strict)
    compiled._passes.clear()  # as in another process
    program = torch.export.load(tmp_path / "program.pt2").module()
    for x, expected in pairs:
        y = program(x)
        assert torch.equal(y[0] if isinstance(y, tuple) else y, expected)


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_program_trains(name: str, recipe: Any, tmp_path: Path) -> None:
    model = MODELS[name]()
    with under(recipe):
        program = export(model, rows().requires_grad_())
        expected = step(model, model, rows())
    torch.export.save(program, tmp_path / "program.pt2")
    compiled._passes.clear()  # as in another process
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    found = step(loaded, loaded, rows())
    outputs = len(expected) - len(list(model.parameters()))
    assert_equal(found[:outputs], expected[:outputs])
    gradients = {key: p.grad for key, p in model.named_parameters()}
    for key, parameter in loaded.named_parameters():
        assert_equal([parameter.grad], [gradients[key]])


def test_a_program_of_several_inputs_takes_one_tensor_for_all() -> None:
    model = scaled()
    x, s, t, u = rows(8).repeat(1, 2).requires_grad_(), torch.rand(8), torch.rand(8), torch.rand(8)
    assert x.shape == (8, 2 * WIDTH)
    program = torch.export.export(model, (x, s, t, u)).module()
    # Such a program does not ask which of its inputs are one tensor, as torch.compile does.
    for given in [(s, s, s), (s, t, s), (t, s, s), (s, t, u)]:
        y, expected = program(x, *given), model(x, *given)
        assert_equal([y], [expected])
        gradients = [torch.autograd.grad(out.sum(), [x]) for out in (y, expected)]
        assert_equal(list(gradients[0]), list(gradients[1]))


def test_a_fresh_process_has_them_too(tmp_path: Path) -> None:
    folders = []
    for name in MODELS:
        for recipe in (None, CURRENT):
            folders.append(tmp_path / f"{name} {recipe is None}")
            saved(folders[-1], name, recipe, is_dynamic=True, strict=False)
    run = python(["-c", FRESH, *folders])
    assert run.returncode == 0, run.stderr


def test_an_exported_program_contains_the_operation_and_not_the_ops_of_torch() -> None:
    with torch.no_grad():
        program = export(Blocks(), rows())
    names = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert names.count("fuser.forward.default") == 2
    assert not [name for name in names if "aten" in name]


def test_a_program_is_under_the_recipe_of_its_export_alone() -> None:
    model = Blocks()
    with torch.no_grad():
        expected = model(rows())
        program = export(model, rows()).module()
        with under(CURRENT):
            assert torch.equal(program(rows()), expected)
            quantized = export(model, rows()).module()
            found = model(rows())
        assert torch.equal(quantized(rows()), found)
        assert not torch.equal(found, expected)


def test_a_program_is_planned_for_the_kernels_of_the_process_that_loads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.no_grad():
        program = export(fuser.Sequential(fuser.GELU(), fuser.ConstantScale(2.0)), rows())
    nodes = [n for n in program.graph.nodes if str(n.target) == "fuser.forward.default"]
    name: Any = nodes[0].args[0]
    for refusal in (None, "there are none here"):
        monkeypatch.setattr(exported, "kernel_refusal", lambda device, refusal=refusal: refusal)
        assert exported.passes_of_export(name).facts.no_kernels == refusal


def custom(role: Any) -> Any:
    return fuser.Float8CurrentScalingQuantizer()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (DELAYED, said("traced-cannot-exported", "Sequential")),
        (
            recipes.CustomRecipe(qfactory=custom),
            said("traced-cannot-exported", "Sequential"),
        ),
    ],
    ids=["delayed", "custom"],
)
def test_what_cannot_be_exported_is_refused(recipe: Any, words: str) -> None:
    with torch.no_grad(), under(recipe):
        with pytest.raises(StateError, match=words):
            export(Blocks(), rows())
        with contextlib.suppress(StateError):
            assert Blocks()(rows()) is not None  # the next call works


def test_aot_inductor_is_refused() -> None:
    with torch.no_grad():
        program = export(Blocks(), rows())
    with pytest.raises(Exception, match="AOTInductor makes a library that runs without Python"):
        torch._inductor.aoti_compile_and_package(program)


class Other:
    """A class that no exported program of fuser contains."""


def test_names_load_classes_of_fuser_alone() -> None:
    def name(content: Any) -> str:
        data = zlib.compress(pickle.dumps(content))
        return exported._PREFIX + base64.b85encode(data).decode()

    with pytest.raises(
        StateError, match=said("exported-names-no-pipeline", "test_exported", "Other")
    ):
        exported.passes_of_export(name(("0", Other())))
    for dotted in ("io.BytesIO", "pickle.Unpickler", "Recipe.mro", "passes_of_export"):
        texts = (text.encode() for text in ("fuser.runtime.exported", dotted))
        module, qualified = (b"\x8c" + bytes([len(text)]) + text for text in texts)
        data = io.BytesIO(b"\x80\x04" + module + qualified + b"\x93.")  # protocol 4: STACK_GLOBAL
        with pytest.raises(
            StateError,
            match=said("exported-names-no-pipeline", "fuser", f"runtime.exported.{dotted}"),
        ):
            exported._Unpickler(data).load()
    with pytest.raises(StateError, match=said("exported-names-no-pipeline", "builtins", "eval")):
        exported.passes_of_export(name(("0", eval)))
    with pytest.raises(StateError, match=said("exported-program-fuser-export", 0)):
        exported.passes_of_export(name(("0", [])))


@pytest.mark.parametrize(
    ("module", "name"), [("fuser.basic_ops.of_another_version", "Bias"), ("fuser.recipe", "Old")]
)
def test_a_class_that_another_version_had_is_refused_by_its_name(module: str, name: str) -> None:
    words = (b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    data = io.BytesIO(b"\x80\x04" + b"".join(words) + b"\x93.")  # protocol 4: STACK_GLOBAL
    with pytest.raises(StateError, match=said("exported-names-no-pipeline", module, name)):
        exported._Unpickler(data).load()
