"""Everything of torch that its documents do not promise, and every look at the Python stack.

A new version of torch may rename or change these. They have been checked with the versions in
``CHECKED``; ``tests/repository/test_torch_private.py`` checks them with the installed one, and that
no other file uses such names. Elsewhere are the methods and tables that a subclass of
``torch.nn.Module`` or of ``torch.Tensor`` overrides or reads, and the names of operators that
``__torch_dispatch__`` gets.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import operator
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import overrides
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable, forward_ad
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

__all__ = ["DeviceContext", "FakeTensorMode", "TensorGuards", "TorchDispatchMode", "pytree"]

Function = TypeVar("Function", bound=Callable[..., Any])

CHECKED = ("2.11", "2.13")
"""The versions of torch whose tests have run."""

Hooks = tuple[Callable[..., Any], Callable[..., Any]]
"""What packs and unpacks saved tensors."""

# -- autograd ----------------------------------------------------------------------------

graph_task = torch._C._current_graph_task_id
"""A number of the backward that runs on this thread; -1 outside of one."""

keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether another backward may follow the running one, through the same nodes."""

will_run_node = torch._C._will_engine_execute_node
"""Whether the running backward needs a node. RuntimeError for a leaf among ``grad``'s inputs."""

is_forward_ad_enabled = torch._C._is_fwd_grad_enabled
"""Whether forward-mode derivatives are followed; not in the forward of a ``Function``."""

is_profiler_enabled = torch._C._autograd._profiler_enabled


def when_backward_ends(function: Callable[[], None]) -> None:
    """Call ``function`` when the running backward ends without an error."""
    Variable._execution_engine.queue_callback(function)


def forward_ad_level() -> int:
    """The number of the innermost ``forward_ad.dual_level()``; -1 outside of one."""
    return forward_ad._current_level


def call_backward_directly(function: type[torch.autograd.Function]) -> None:
    """Make the nodes of ``function`` call its ``backward`` without a check at every call.

    torch's own node checks that the class has a ``backward`` and no ``vjp``: 2.5 us for a constant.
    """
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]


# -- hooks of saved tensors --------------------------------------------------------------

_autograd = torch._C._autograd

saved_tensor_hooks: Callable[[bool], Hooks | None] = _autograd._top_saved_tensors_default_hooks
"""The innermost hooks; None if there are none. True: also those that tracing does not see."""


def all_saved_tensor_hooks(top: Hooks) -> list[Hooks]:
    """All hooks of saved tensors, the innermost first, which is ``top``.

    torch returns only the innermost, so this removes them one by one and puts them back.
    """
    if _autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return [top]  # hooks could not be put back
    removed: list[Hooks] = []
    try:
        while (hooks := saved_tensor_hooks(True)) is not None:
            removed.append(hooks)
            _autograd._pop_saved_tensors_default_hooks()
    finally:
        for pack, unpack in reversed(removed):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
    return removed


# -- autocast, and torch.func ------------------------------------------------------------

is_any_autocast_enabled = torch._C._is_any_autocast_enabled
without_autocast = torch._C._DisableAutocast
"""Context without torch's autocast on any device."""

is_functorch_active = torch._C._are_functorch_transforms_active


def functorch_transform() -> str | None:
    """The kind of the innermost transform of torch.func, such as ``Vmap``; None without one."""
    if not is_functorch_active():
        return None
    return str(torch._C._functorch.peek_interpreter_stack().key().name)


is_of_batched_gradients = torch._C._functorch.is_legacy_batchedtensor
"""Whether a tensor hides a batch: one of ``torch.autograd.grad(is_grads_batched=True)``."""


# -- the default device ------------------------------------------------------------------


def is_default_device_set() -> bool:
    """Whether the user set torch's default device, also through ``with device:``."""
    # A device that the user set is a DeviceContext on the stack of function modes.
    stack: list[object] = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, DeviceContext) for mode in stack)


# -- CUDA, without the checks of torch.cuda ----------------------------------------------

# A CPU build of torch has none of them.
cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The index of the current device. CUDA must be initialised."""

cuda_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]
"""The driver's handle of the current stream of a device."""


def _getter(name: str) -> Callable[..., Any]:
    """A getter of a setting; one that returns None where torch does not have it."""
    getter: Callable[..., Any] = getattr(torch._C, name, lambda *_: None)
    return getter


_fp16_reduction = _getter("_get_cublas_allow_fp16_reduced_precision_reduction")
_fp16_accumulation = _getter("_get_cublas_allow_fp16_accumulation")
_bf16_reduction = _getter("_get_cublas_allow_bf16_reduced_precision_reduction")
_deterministic = _getter("_get_deterministic_algorithms")
_blas_library = _getter("_get_blas_preferred_backend")
_sm_carveout = _getter("_get_sm_carveout_experimental")
_fp32_precision = _getter("_get_fp32_precision_getter")
if not hasattr(torch._C, "_get_fp32_precision_getter"):
    # The older getter is an error after the newer setting was used.
    _fp32_precision = lambda *_: torch._C._get_cublas_allow_tf32()  # noqa: E731


# Of a size, strides and a dtype, on the current GPU: below torch's dispatcher, at half the cost.
empty_on_gpu: Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor] | None = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)


def product_settings() -> tuple[object, ...]:
    """What torch reads at each product on a GPU: its settings of cuBLAS.

    A library is named by its number, for torch's enumerations are slow to compare.
    """
    return (
        _fp16_reduction(),
        _fp16_accumulation(),
        _bf16_reduction(),
        _deterministic(),
        _blas_library().value,
        _sm_carveout(),
        _fp32_precision("cuda", "matmul"),
    )


def set_sync_debug_mode(mode: int) -> None:
    """``torch.cuda.set_sync_debug_mode`` without its warning."""
    torch._C._cuda_set_sync_debug_mode(mode)


# -- tensors -----------------------------------------------------------------------------

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""A ``__torch_function__`` that leaves the class to ``__torch_dispatch__``."""

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""Context in which attributes of tensors are read without a look for ``__torch_function__``: of a
subclass that takes four times as long."""

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""A tensor of a subclass, with a shape and without memory of its own."""

parse_to: Callable[..., Any] = torch._C._nn._parse_to
"""Device, dtype, non_blocking and memory format of the arguments of ``Tensor.to``."""


def storage_uses(storage: torch.UntypedStorage) -> int:
    """The number of tensors that have a storage, and of Python objects for it besides tensors."""
    return int(torch._C._storage_Use_Count(storage._cdata))


# -- operations --------------------------------------------------------------------------


@functools.cache
def is_composite(function: torch._ops.OpOverload) -> bool:
    """Whether an operation is calls of others alone, which torch makes at autograd.

    Below it a call comes whole. ``silu_backward`` has kernels too, with bits of their own.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    kernels = ("CPU", "CUDA", "CompositeExplicitAutograd")
    schema = function._schema
    name = ".".join(filter(None, (schema.name, schema.overload_name)))
    return has_kernel(name, "CompositeImplicitAutograd") and not any(
        has_kernel(name, key) for key in kernels
    )


scaled_mm = torch._scaled_mm
addmm_activation: Callable[..., torch.Tensor] = torch.ops.aten._addmm_activation
foreach_copy_ = torch._foreach_copy_
foreach_maximum_ = torch._foreach_maximum_
gelu: Callable[..., torch.Tensor] = torch._C._nn.gelu

# Finding the overload at every call costs 0.8 us, and its wrapper 0.6 us if a keyword is given.
gelu_backward = torch.ops.aten.gelu_backward.default._op
silu_backward = torch.ops.aten.silu_backward.default._op
sigmoid_backward = torch.ops.aten.sigmoid_backward.default._op
threshold_backward = torch.ops.aten.threshold_backward.default._op


# -- hooks of modules and parameters -----------------------------------------------------


def hooks_of(module: torch.nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """The hooks that torch runs around a call of ``module`` itself, as torch keeps them."""
    after, before = module._forward_hooks, module._forward_pre_hooks
    return [before, after, module._backward_pre_hooks, module._backward_hooks]


def has_loading_hooks(module: torch.nn.Module) -> bool:
    """Whether ``load_state_dict`` runs hooks of the module."""
    return bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks)


# The hooks that torch runs around the calls of every module: always these objects.
global_forward_pre_hooks = torch_module._global_forward_pre_hooks
global_forward_hooks = torch_module._global_forward_hooks
global_backward_pre_hooks = torch_module._global_backward_pre_hooks
global_backward_hooks = torch_module._global_backward_hooks


def has_global_hooks() -> bool:
    """Whether torch runs hooks around the calls of every module."""
    return bool(
        global_forward_hooks
        or global_forward_pre_hooks
        or global_backward_hooks
        or global_backward_pre_hooks
    )


gradient_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
"""The hooks of a parameter that run after its gradient has been accumulated; None or a dict."""


# -- operators ---------------------------------------------------------------------------


def leave_out_of_ddp(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Name parameters and buffers of ``module`` that DistributedDataParallel is not to send."""
    leave_out: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    leave_out(module, list(names))


schema_of = operator.attrgetter("_schema")
"""The names and kinds of the arguments of an operator that ``__torch_dispatch__`` gets."""

# -- torch.compile -----------------------------------------------------------------------


def breaks_graph(function: Function) -> Function:
    """Decorator: dynamo traces neither ``function`` nor the functions that it calls.

    A compiled caller calls it between two graphs. ``torch.compiler.disable`` does the same with a
    wrapper, which costs 1 us at every call, compiled or not. This decorator marks the function
    itself, and a call costs nothing more.
    """
    reason = "fuser plans and runs a pipeline itself, as one autograd node"
    try:
        # The frame evaluation of torch.compile. This import does not import torch._dynamo.
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError):  # a version of torch that has it in another place
        disabled: Function = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
        return disabled
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


def constant_in_graphs(function: Function) -> Function:
    """Decorator: Dynamo calls ``function`` while it traces, and takes the result for a constant.

    As ``torch._dynamo.assume_constant_result``, whose import takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def call_while_tracing(function: Callable[[Any], None], subject: object) -> None:
    """In traced code: Dynamo calls ``function`` with :func:`traced_subject` of its argument.

    It does so once, while it traces, and guards on nothing of ``subject``.
    """
    from torch._dynamo.comptime import comptime

    comptime(function)


def traced_subject(context: Any) -> Any:
    """The object that :func:`call_while_tracing` was given."""
    return context.get_local("subject")._ComptimeVar__variable.value


def _output_graph(context: Any) -> Any:
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output


def traced_graph(context: Any) -> Any:
    """What stands for the graph that Dynamo makes now: another object if it starts again."""
    return _output_graph(context).tracing_context


def is_traced_in_checkpoint(context: Any) -> bool:
    """Whether the traced code is in a function that a part of the graph calls."""
    # The frames of Dynamo: that of ``call_while_tracing`` and those around it.
    return _output_graph(context).current_tracer.parent is not None


def compiled_from(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module that ``torch.compile`` was given to make ``module``; None if it did not."""
    import torch._dynamo

    is_result = isinstance(module, torch._dynamo.OptimizedModule)
    return module._orig_mod if is_result else None  # type: ignore[return-value]


def call_with_writes(function: Callable[..., Any], *args: Any) -> Any:
    """In traced code: call ``function``, which may write to objects that were there before.

    In a function that a part of the graph calls, such as a checkpointed one, Dynamo refuses such
    writes, for a recomputation would not repeat them. Here ``function`` takes them all back.
    """
    import torch._dynamo.utils as utils

    name = "_disable_side_effect_safety_checks_for_current_subtracer"
    allow = getattr(utils, name, None)
    return function(*args) if allow is None else allow(function, *args)


def graph_break(reason: str) -> None:
    """In traced code: end the graph here; an error with this reason under ``fullgraph=True``."""
    import torch._dynamo

    torch._dynamo.graph_break(msg=reason)


PICKLED_META_PARAMETERS = [
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"),
]
"""The functions that a pickle of parameters on the meta device names."""


def is_compiled_ahead() -> bool:
    """Whether AOTInductor compiles a program now."""
    virtualized = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and bool(virtualized.V.aot_compilation)


dispatch_modes = torch._C._len_torch_dispatch_stack
"""The number of modes that get each call of an operator, such as those of selective checkpoints."""


def is_in_selective_checkpoint() -> bool:
    """Whether a selective checkpoint compares each call of an operator."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    kinds = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)
    return any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack())


_is_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def is_traced_with_proxies() -> bool:
    """Whether each call of an operator becomes a node of a graph, as under ``make_fx``."""
    if not (dispatch_modes() or _is_included(_PRE_DISPATCH)):
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # takes a second

    return get_proxy_mode() is not None


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has sizes and no values, as those of a function that is traced."""
    return isinstance(tensor, FakeTensor)


@contextlib.contextmanager
def without_logs_of_fake_tensors() -> Iterator[None]:
    """Context in which a failed operation on fake tensors raises, and logs no traceback besides."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@contextlib.contextmanager
def outside_fake_mode() -> Iterator[None]:
    """Context in which tensors are real, inside a function that is being traced."""
    if not dispatch_modes():
        yield
        return
    # Their import takes long, and has happened if there is such a mode.
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with unset_fake_temporarily(), _disable_current_modes():
        yield


def size_hint(size: int | torch.SymInt) -> int:
    """A size; of a symbolic one, the size of the call that was traced."""
    return size if isinstance(size, int) else int(size.node.hint)


def is_always_at_least(size: int | torch.SymInt, least: int | torch.SymInt) -> bool:
    """Whether a size is so large in every call of a graph that is traced; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes a second

    return statically_known_true(size >= least)


def symbols_of(tensor: torch.Tensor) -> set[object]:
    """The symbols in the sizes and strides of a fake tensor."""
    symbols: set[object] = set()
    for size in (*tensor.size(), *tensor.stride()):
        if isinstance(size, torch.SymInt):
            symbols |= size.node.expr.free_symbols
    return symbols


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the storage of a tensor, real or fake, as long as it lives."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def in_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as another tensor, with a storage of its own; of a fake tensor, another."""
    size, stride = tensor.size(), tensor.stride()
    if is_fake(tensor) or tensor.is_meta:
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    alias = torch.utils.dlpack.from_dlpack(tensor.detach())
    return alias.as_strided(size, stride, alias.storage_offset())


# -- the Python stack --------------------------------------------------------------------


def calling_file(level: int) -> str:
    """The file of the function ``level`` calls above the one that asks."""
    return sys._getframe(level).f_code.co_filename


def frames() -> Iterator[FrameType]:
    """The frames that are running now, from that of the caller outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


WITHOUT_EFFECT = ("torch._jit_internal", "torch._dynamo")
"""Modules of torch whose functions say whether code is scripted, or hide it from Dynamo."""


class Call(NamedTuple):
    """A call of a function, before it runs: of Python code, or else of ``function``."""

    frame: FrameType
    function: Any = None

    @property
    def code(self) -> CodeType:
        """The code of Python that is called, or that calls the function."""
        return self.frame.f_code

    @property
    def modules(self) -> Iterator[str]:
        """The modules of that code and of what called it, outwards."""
        frame: FrameType | None = self.frame
        while frame is not None:
            yield module_of(frame)
            frame = frame.f_back

    def variables(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The globals of that code and its local variables."""
        return self.frame.f_globals, self.frame.f_locals


@contextlib.contextmanager
def told_of_calls(see: Callable[[Call], None]) -> Iterator[None]:
    """A context in which ``see`` is told of calls, before they run, and may raise."""

    def told(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            see(Call(frame, function if event == "c_call" else None))

    outer = sys.getprofile()
    sys.setprofile(told)
    try:
        yield
    finally:
        sys.setprofile(outer)


def calling_module(known: Container[int]) -> tuple[FrameType | None, int]:
    """The innermost call on the stack of a module whose ``id`` is known; (None, 0) without one."""
    code = torch.nn.Module._call_impl.__code__
    for frame in frames():
        if frame.f_code is code and id(frame.f_locals["self"]) in known:
            return frame, id(frame.f_locals["self"])
    return None, 0


def raising_module(error: BaseException, modules: Container[int]) -> int | None:
    """The ``id`` of the innermost of ``modules`` whose code raised ``error``; None if none did."""
    innermost, at = None, error.__traceback__
    while at is not None:
        owner = id(at.tb_frame.f_locals.get("self"))
        innermost = owner if owner in modules else innermost
        at = at.tb_next
    return innermost


def module_of(frame: FrameType) -> str:
    """The name of the module whose code runs in a frame."""
    return str(frame.f_globals.get("__name__", ""))


def is_called_from(module: str, function: str | None = None) -> bool:
    """Whether ``function``, or any, of a module whose name starts so is running now."""
    return any(
        module_of(frame).startswith(module) and function in (None, frame.f_code.co_name)
        for frame in frames()
    )


def running_load() -> tuple[Any, Mapping[str, Any]] | None:
    """The plan of the load of a distributed checkpoint that runs, and the state it writes to.

    Its tensors are told nothing but ``copy_`` of their rows, so this looks at the reader's call,
    ``read_data(plan, planner)``, on the stack. None outside of one.
    """
    planner_module = sys.modules.get("torch.distributed.checkpoint.planner")
    if planner_module is None:
        return None
    for frame in frames():
        if frame.f_code.co_name == "read_data":
            plan, planner = map(frame.f_locals.get, ("plan", "planner"))
            if isinstance(plan, planner_module.LoadPlan):
                return plan, getattr(planner, "state_dict", {})
    return None


def is_module_conversion() -> bool:
    """Whether ``torch.nn.Module`` is converting its parameters now.

    Modules of any kind call the conversion on each parameter (``t.half()``, ``t.to(...)``) without
    telling why, so this looks for ``Module._apply`` on the call stack.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    return any(frame.f_code is torch.nn.Module._apply.__code__ for frame in frames())


def users_level() -> int:
    """The level for ``warnings.warn`` in the caller, at which neither fuser nor torch runs."""
    ours = ("fuser", "torch")
    for level, frame in enumerate(frames()):  # no comprehension: it would be a frame itself
        if module_of(frame).split(".")[0] not in ours:
            return level
    return 1


# -- checkpoints of state dicts ----------------------------------------------------------

STAGER = "torch.distributed.checkpoint._state_dict_stager"
"""torch's copy of a state dict before ``dcp.async_save`` writes it."""


def is_called_by_stager() -> bool:
    """Whether the caller is called by :data:`STAGER`."""
    return module_of(sys._getframe(2)) == STAGER


# -- activation checkpointing ------------------------------------------------------------


class CheckpointCode:
    """The code of torch's checkpoints, which is searched for on the stack.

    Making it is an AttributeError, StopIteration or ValueError if the checkpoints of this torch are
    written in another way.
    """

    def __init__(self) -> None:
        hook, rehook = checkpoint._checkpoint_hook, checkpoint._recomputation_hook
        self.pack = _inner_code(hook.__init__, "pack_hook")
        self.unpack = _inner_code(hook.__init__, "unpack_hook")
        self.frame_cell = self.pack.co_freevars.index("frame")
        self.recomputing_unpack = _inner_code(rehook.__init__, "unpack_hook")
        self.reentrant_forward = checkpoint.CheckpointFunction.forward.__code__
        self.reentrant_backward = checkpoint.CheckpointFunction.backward.__code__
        self.engine = torch.autograd.graph._engine_run_backward.__code__
        for code, names in (
            (self.unpack, ("frame", "gid")),
            (self.reentrant_forward, ("ctx",)),
            (self.reentrant_backward, ("ctx",)),
        ):
            for name in names:
                (code.co_varnames + code.co_cellvars + code.co_freevars).index(name)

    def running(self) -> tuple[tuple[object, int] | None, list[Any]]:
        """The nearest recomputation, None if none runs, and the nodes of reentrant forwards in it.

        The recomputation has the object that torch keeps for it, the frame of a checkpoint or the
        node of a reentrant one, and the number of the backward. What is around a backward, which
        may run inside a forward, does not count.
        """
        nodes: list[Any] = []
        for frame in frames():
            code = frame.f_code
            if code is self.engine:
                break
            if code is self.unpack:
                values = frame.f_locals
                return (values["frame"], values["gid"]), nodes
            if code is self.reentrant_backward:
                return (frame.f_locals["ctx"], graph_task()), nodes
            if code is self.reentrant_forward:
                nodes.append(frame.f_locals["ctx"])
        return None, nodes

    def frame_of(self, hooks: Hooks) -> Any:
        """The frame of the checkpoint that installed ``hooks``; None if no checkpoint did."""
        pack = hooks[0]
        if getattr(pack, "__code__", None) is not self.pack:
            return None
        cells = pack.__closure__
        return None if cells is None else cells[self.frame_cell].cell_contents

    def are_of_recomputation(self, hooks: Hooks) -> bool:
        """Whether ``hooks`` are those under which a checkpoint runs its function again."""
        return getattr(hooks[1], "__code__", None) is self.recomputing_unpack


def _inner_code(function: Any, name: str) -> CodeType:
    """The code of the function called ``name`` inside ``function``."""
    constants = function.__code__.co_consts
    return next(c for c in constants if isinstance(c, CodeType) and c.co_name == name)


# -- fully_shard -------------------------------------------------------------------------
# ``param`` is torch's FSDPParam, ``group`` its FSDPParamGroup.

FSDP2 = "torch.distributed.fsdp._fully_shard"


def fsdp_params() -> Iterator[tuple[Any, Any]]:
    """Every parameter that ``fully_shard`` gathers in this process, with its group."""
    states = sys.modules.get("torch.distributed._composable_state")
    if states is None or FSDP2 not in sys.modules:
        return
    for reference in list(states._module_state_mapping.values()):
        for group in _fsdp_groups(reference()):
            for param in group.fsdp_params:
                yield param, group


def _fsdp_groups(state: Any) -> list[Any]:
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 and before
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return groups


def fsdp_caller(kind: str, function: str | None = None) -> Any:
    """The object of class ``kind`` of ``fully_shard`` one of whose methods is running now, or None.

    It tells a tensor neither that it is being sharded nor for which pass it is gathered.
    """
    for frame in frames():
        if FSDP2 in module_of(frame):
            method_of = frame.f_locals.get("self")
            if type(method_of).__name__ == kind and function in (None, frame.f_code.co_name):
                return method_of
    return None


def fsdp_callers() -> dict[str, Any]:
    """The objects of ``fully_shard`` whose methods are running now, by the names of their classes.

    The innermost of each class, up to the ``FSDPState`` that calls the others.
    """
    running: dict[str, object] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "FSDPState" not in running:
        if FSDP2 in frame.f_globals.get("__name__", ""):
            method_of = frame.f_locals.get("self")
            running.setdefault(type(method_of).__name__, method_of)
        frame = frame.f_back
    return running


def gathered_tensor(param: Any) -> torch.Tensor | None:
    """The parameter as modules see it while it is gathered."""
    tensor: torch.Tensor | None = getattr(param, "_unsharded_param", None)
    return tensor


def local_shard(param: Any) -> Any:
    """This rank's part, as the user's tensor."""
    return param._sharded_local_tensor


def whole_size(param: Any) -> torch.Size:
    """The shape of the parameter before it was sharded."""
    size: torch.Size = param._orig_size
    return size


def free_with(param: Any, tensor: torch.Tensor) -> None:
    """Make ``fully_shard`` free the memory of ``tensor`` when it frees the parameter."""
    param._unsharded_inner_tensors.append(tensor)


def training_state(group: Any) -> str:
    """FORWARD, PRE_BACKWARD, POST_BACKWARD or IDLE."""
    return str(group._training_state.name)


def reshards_after_forward(group: Any) -> bool:
    return bool(group._reshard_after_forward)


def forwards_without_backward(group: Any) -> int:
    """The number of forwards whose backward is still to come."""
    return len(group._post_forward_indices)


def is_last_backward(state: Any) -> bool:
    """What ``set_is_last_backward`` said last; ``state`` is an FSDPState."""
    return bool(state._state_ctx.is_last_backward)


# -- other libraries of torch.distributed ------------------------------------------------


def is_unfinished(tensor: object) -> bool:
    """Whether a tensor is the result of a collective of torch that may still run."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


def spec_of(dtensor: Any) -> Any:
    """Mesh, placements, shape and strides of a ``DTensor``."""
    return dtensor._spec


def running_data_parallel() -> Any:
    """The ``DistributedDataParallel`` whose forward is running; None if none is."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


class _TensorsOnly(pickle.Unpickler):
    """Reads what ``pickle.dumps`` writes of tensors, and of the classes that it is given."""

    def __init__(self, data: bytes, classes: Mapping[str, type]) -> None:
        super().__init__(io.BytesIO(data))
        self._named: dict[str, object] = {
            **classes,
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
            "torch.storage._load_from_bytes": _storage_of,
            # Megatron-LM 0.18 and newer puts this in the place of torch's, and pickles name it.
            "megatron.core.safe_globals.safe_load_from_bytes": _storage_of,
        }

    def find_class(self, module: str, name: str) -> Any:
        return self._named[f"{module}.{name}"]


def _storage_of(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def unpickled(data: bytes, classes: Mapping[str, type]) -> Any:
    """What ``pickle.dumps`` wrote: containers, numbers, texts, plain tensors, and ``classes``.

    A KeyError if it names anything else, which is not imported; an error of ``pickle``, such as
    UnpicklingError, if the bytes are something else.
    """
    return _TensorsOnly(data, classes).load()
