"""What is private in torch is used in one file, and is as that file says in the installed torch."""

from __future__ import annotations

import ast
import logging
import sys
from typing import Any

import pytest
import torch
from paths import ROOT
from private_names import defined, private_names
from torch.utils.checkpoint import checkpoint

from fuser import torch_private

FILES = sorted((ROOT / "fuser").rglob("*.py"))
THE_ONE = ROOT / "fuser" / "torch_private.py"


def test_private_names_of_torch_and_looks_at_the_stack_are_in_one_file() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    own = defined([tree for path, tree in trees.items() if path != THE_ONE])
    elsewhere = [
        f"{path.relative_to(ROOT)}:{name}"
        for path, tree in trees.items()
        if path != THE_ONE
        for name in private_names(tree, own)
    ]
    assert elsewhere == []
    assert len(list(private_names(trees[THE_ONE], own))) > 30


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._current_graph_task_id()",
        "torch._scaled_mm(a, b)",
        "from torch.utils import _pytree",
        "from torch._C._dynamo import eval_frame",
        "group._training_state",
        "sys._getframe(1)",
        "frame.f_back",
        "sys.modules.get('torch.distributed._composable_state')",
    ],
)
def test_each_kind_of_private_name_is_seen(line: str) -> None:
    assert list(private_names(ast.parse(line), set()))


@pytest.mark.parametrize(
    "line", ["module._parameters", "aten._to_copy.default", "torch.nn.Module._apply", "t._version"]
)
def test_what_subclasses_may_read_is_not_private(line: str) -> None:
    assert not list(private_names(ast.parse(line), set()))


# -- the installed torch is as the file says ---------------------------------------------


def test_a_backward_has_a_number_and_calls_back_at_its_end() -> None:
    happened: list[Any] = []

    def hook(grad: torch.Tensor) -> None:
        happened.append(torch_private.graph_task() >= 0)
        torch_private.when_backward_ends(lambda: happened.append("end"))

    x = torch.ones(2, requires_grad=True)
    y = 2 * x
    y.register_hook(hook)
    y.sum().backward()
    assert happened == [True, "end"]
    assert torch_private.graph_task() == -1


def test_a_backward_says_which_nodes_it_needs() -> None:
    found: list[bool] = []
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    product = a * b
    total = product.sum()
    nodes = [edge[0] for edge in product.grad_fn.next_functions]
    product.register_hook(lambda _: found.extend(map(torch_private.will_run_node, nodes)))
    total.backward(inputs=[a])
    assert found == [True, False]


def test_hooks_of_saved_tensors_are_listed_from_the_innermost_and_stay() -> None:
    def pair() -> torch_private.Hooks:
        return (lambda t: t), (lambda t: t)

    outer, inner = pair(), pair()
    hooks = torch.autograd.graph.saved_tensors_hooks
    assert torch_private.saved_tensor_hooks(True) is None
    with hooks(*outer), hooks(*inner):
        top = torch_private.saved_tensor_hooks(True)
        assert top == inner
        for _ in range(2):
            assert torch_private.all_saved_tensor_hooks(top) == [inner, outer]
        assert torch_private.saved_tensor_hooks(True) == inner


def test_autocast_is_seen_and_left() -> None:
    a = torch.ones(2, 2)
    assert not torch_private.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch_private.is_any_autocast_enabled()
        with torch_private.without_autocast():
            assert not torch_private.is_any_autocast_enabled()
            assert torch.mm(a, a).dtype is torch.float32


def test_transforms_and_forward_mode_are_seen() -> None:
    kinds: list[str | None] = [torch_private.functorch_transform()]

    def note(x: torch.Tensor) -> torch.Tensor:
        kinds.append(torch_private.functorch_transform())
        return x.sum()

    torch.func.vmap(note)(torch.ones(2, 2))
    torch.func.grad(note)(torch.ones(2))
    assert kinds == [None, "Vmap", "Grad"]
    assert torch_private.forward_ad_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.forward_ad_level() == 0


def test_batched_gradients_are_seen() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x.clone()
    y.register_hook(lambda grad: seen.append(torch_private.is_of_batched_gradients(grad)))
    torch.autograd.grad(y, x, torch.ones(3, 2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(2))
    assert seen == [True, False]


def test_a_device_that_the_user_set_is_seen() -> None:
    assert not torch_private.is_default_device_set()
    with torch.device("cpu"):
        assert torch_private.is_default_device_set()


def test_tensors_in_a_memory_are_counted() -> None:
    x = torch.ones(4)
    alone = torch_private.storage_uses(x.untyped_storage())
    view = x[1:]
    assert torch_private.storage_uses(x.untyped_storage()) == alone + 1
    del view
    assert torch_private.storage_uses(x.untyped_storage()) == alone


def test_arguments_of_to_are_read() -> None:
    device, dtype, non_blocking, memory_format = torch_private.parse_to(torch.float16, True)
    assert (device, dtype, non_blocking, memory_format) == (None, torch.float16, True, None)


@pytest.mark.parametrize("name", ["register_forward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_a_module_are_seen(name: str) -> None:
    module = torch.nn.Linear(2, 2)
    assert not any(torch_private.hooks_of(module))
    handle = getattr(module, name)(lambda *_: None)
    assert any(torch_private.hooks_of(module))
    handle.remove()
    assert not any(torch_private.hooks_of(module))
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert torch_private.has_global_hooks()
    handle.remove()
    assert not torch_private.has_global_hooks()


def test_hooks_after_a_gradient_are_seen() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert not torch_private.gradient_hooks(weight)
    weight.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_private.gradient_hooks(weight)


def test_attributes_are_read_without_a_torch_function_inside() -> None:
    asked = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(2).as_subclass(Asked)
    asked.clear()
    with torch_private.without_torch_function():
        assert tensor._version == 0
    assert not asked
    assert tensor._version == 0
    assert asked


def test_a_guard_sees_another_tensor() -> None:
    assert torch_private.TensorGuards is not None
    guard = torch_private.TensorGuards(  # type: ignore[misc]
        torch.ones(2), dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    assert guard.check(torch.zeros(2))
    assert not guard.check(torch.zeros(3))


def test_the_stack_is_walked_from_the_caller_outwards() -> None:
    def called() -> list[str]:
        return [frame.f_code.co_name for frame in torch_private.frames()]

    names = called()
    assert names[names.index("called") + 1] == "test_the_stack_is_walked_from_the_caller_outwards"
    assert torch_private.is_called_from(__name__)
    assert not torch_private.is_called_from(__name__, "another_function")


def test_a_conversion_by_a_module_is_seen() -> None:
    found: list[bool] = []

    class Noting(torch.nn.Linear):
        def _apply(self, function: Any, recurse: bool = True) -> Any:
            def noted(tensor: torch.Tensor) -> Any:
                found.append(torch_private.is_module_conversion())
                return function(tensor)

            return super()._apply(noted, recurse)

    Noting(2, 2).half()
    assert found == [True, True]
    assert not torch_private.is_module_conversion()


def test_the_code_of_checkpoints_is_on_the_stack_when_they_run() -> None:
    codes = torch_private.CheckpointCode()
    found: list[list[bool]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        running = {frame.f_code for frame in torch_private.frames()}
        of = (codes.reentrant_forward, codes.reentrant_backward, codes.unpack)
        found.append([code in running for code in of])
        return x.sin()

    for use_reentrant in (True, False):
        x = torch.ones(2, requires_grad=True)
        checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
    assert found == [
        [True, False, False],
        [False, True, False],
        [False, False, False],
        [False, False, True],
    ]


def test_an_operation_is_a_composite_if_torch_has_it_as_calls_of_others_alone() -> None:
    aten = torch.ops.aten
    names = ["linear.default", "silu_backward.default", "mm.default", "reshape.default"]
    functions = [getattr(getattr(aten, name), kind) for name, kind in (n.split(".") for n in names)]
    found = dict(zip(names, map(torch_private.is_composite, functions), strict=True))
    assert found == {
        "linear.default": True,
        "silu_backward.default": False,
        "mm.default": False,
        "reshape.default": True,
    }
    with torch.library._scoped_library("fuser_of_a_test", "DEF") as library:
        library.define("shapes_alone(Tensor x) -> Tensor")
        library.impl("shapes_alone", torch.empty_like, "Meta")
        assert not torch_private.is_composite(torch.ops.fuser_of_a_test.shapes_alone.default)


def test_nothing_is_compiled_ahead_if_inductor_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch._inductor.virtualized", raising=False)
    assert torch_private.is_compiled_ahead() is False


def test_failed_operations_on_fake_tensors_log_nothing_inside_and_something_after() -> None:
    logger, seen = logging.getLogger("torch._subclasses.fake_tensor"), []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with torch_private.without_logs_of_fake_tensors():
            logger.error("inside")
        logger.error("after")
    finally:
        logger.removeHandler(handler)
    assert seen == ["after"]


def test_nothing_is_gathered_or_unfinished_in_a_plain_process() -> None:
    assert torch_private.fsdp_caller("FSDPState") is None
    assert torch_private.running_data_parallel() is None
    assert not torch_private.is_unfinished(torch.ones(2))
