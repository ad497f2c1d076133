"""Kernels and stages of users: files outside of the library, compiled and run as its own are."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nvrtc
import pytest
import torch
from emulator import KernelError, emulated
from fresh import python
from needs import needs_nvrtc
from said import holds, said, sentence

import fuser
from fuser import chain
from fuser.chain import STAGES, Stage, register
from fuser.cuda import Kernel, Launch, float32, int32, module, sources
from fuser.errors import StateError
from fuser.testing import check

AXPY = """
#include <fuser/extend.cuh>
#include "factor.cuh"

extern "C" __global__ void axpy(const float* x, float* y, float a, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        y[i] = fuser::mul_rn(a * kFactor, x[i]);
    }
}
"""
TANH = """
#pragma once
#include <fuser/extend.cuh>

namespace mine {

struct TanhFunction : fuser::Smooth {
    __device__ __forceinline__ static float value(float x, const float*) {
        return fuser::tanh_at(x).value;
    }
    __device__ __forceinline__ static fuser::Point at(float x, const float*) {
        return fuser::tanh_at(x);
    }
};

template <class T>
using Tanh = fuser::Unary<TanhFunction>;

}  // namespace mine
"""
SHRINK = """
#pragma once
#include <fuser/extend.cuh>

namespace mine {

// y = x / scalar.
struct Shrink : fuser::Stage {
    static constexpr int kScalars = 1;

    __device__ __forceinline__ static float value(const float (&x)[1], float,
                                                  const float* scalars) {
        return fuser::mul_rn(x[0], 1.0f / scalars[0]);
    }
    __device__ __forceinline__ static float gradient(float dy, const float (&)[1], float,
                                                     const float* scalars, float (&dx)[1]) {
        dx[0] = fuser::mul_rn(dy, 1.0f / scalars[0]);
        return 0.0f;
    }
};

}  // namespace mine
"""


@pytest.fixture
def axpy(tmp_path: Path) -> Path:
    (tmp_path / "factor.cuh").write_text("constexpr float kFactor = 2.0f;\n")
    path = tmp_path / "axpy.cu"
    path.write_text(AXPY)
    return path


def run_axpy(kernel: Kernel, x: torch.Tensor, a: float) -> torch.Tensor:
    y = torch.empty_like(x)
    with emulated(written=(y,)):
        kernel(Launch((-(-x.numel() // 32),), (32,)), x, y, float32(a), int32(x.numel()))
    return y


# -- kernels ------------------------------------------------------------------


def test_a_kernel_of_a_users_file_runs_with_fusers_headers_and_its_own(axpy: Path) -> None:
    x = torch.randn(100)
    torch.testing.assert_close(run_axpy(Kernel(axpy, "axpy"), x, 0.5), x)


def test_two_files_of_one_name_are_two_kernels(axpy: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "axpy.cu"
    other.write_text(AXPY.replace("mul_rn(a * kFactor, x[i])", "mul_rn(a, 3.0f)"))
    (tmp_path / "other" / "factor.cuh").write_text("")
    x = torch.randn(64)
    first, second = Kernel(axpy, "axpy"), Kernel(other, "axpy")
    assert first != second
    torch.testing.assert_close(run_axpy(first, x, 1.0), 2 * x)
    torch.testing.assert_close(run_axpy(second, x, 1.0), torch.full((64,), 3.0))
    torch.testing.assert_close(run_axpy(first, x, 1.0), 2 * x)


def test_an_edited_header_of_a_user_is_compiled_anew(axpy: Path) -> None:
    x = torch.randn(64)
    before = sources.own_options([axpy])
    torch.testing.assert_close(run_axpy(Kernel(axpy, "axpy"), x, 1.0), 2 * x)
    (axpy.parent / "factor.cuh").write_text("constexpr float kFactor = 5.0f;\n")
    torch.testing.assert_close(run_axpy(Kernel(axpy, "axpy"), x, 1.0), 5 * x)
    assert sources.own_options([axpy]) != before


def test_the_digest_reads_only_what_is_included(axpy: Path) -> None:
    before = sources.own_options([axpy])
    (axpy.parent / "unrelated.cuh").write_text("int x;\n")
    assert sources.own_options([axpy]) == before
    assert sources.own_files(axpy) == (axpy, axpy.parent / "factor.cuh")
    (axpy.parent / "factor.cuh").write_text('#include "unrelated.cuh"\n#include "factor.cuh"\n')
    assert len(sources.own_files(axpy)) == 3


def test_a_path_from_the_working_directory_is_made_absolute(
    axpy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(axpy.parent)
    kernel = Kernel(Path("axpy.cu"), "axpy")
    assert kernel == Kernel(axpy, "axpy")
    assert kernel.module == axpy


def test_a_file_that_is_not_there_is_refused_when_the_kernel_is_made(tmp_path: Path) -> None:
    with pytest.raises(fuser.InputError, match=said("sources-source-cu-file", holds("/mine.cu"))):
        Kernel(tmp_path / "mine.cu", "axpy")
    (tmp_path / "mine.cuh").write_text("")
    with pytest.raises(
        fuser.InputError, match=said("sources-source-cu-file-not", holds("mine.cuh"))
    ):
        Kernel(tmp_path / "mine.cuh", "axpy")


def test_the_emulator_names_the_line_of_a_users_file(axpy: Path) -> None:
    axpy.write_text("// one\nint two = ;\n")
    with pytest.raises(KernelError, match=r"axpy\.cu:2:11: error"):
        run_axpy(Kernel(axpy, "axpy"), torch.zeros(1), 1.0)
    axpy.write_text('#include "nowhere.cuh"\n')
    with pytest.raises(KernelError, match=r"axpy\.cu includes nowhere\.cuh"):
        run_axpy(Kernel(axpy, "axpy"), torch.zeros(1), 1.0)


class CompileException(Exception):
    """Stands for CuPy's."""


class CUDADriverError(Exception):
    """Stands for CuPy's."""


def headers_of(code: str) -> list[Path]:
    """The files at absolute paths that a source includes."""
    return [Path(name) for name in sources.INCLUDE.findall(code) if name.startswith("/")]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What a stand-in for CuPy was asked to compile; it knows the kernel axpy and templates."""
    asked: list[dict[str, Any]] = []

    class RawModule:
        module = types.SimpleNamespace(ptr=0)  # cupy.cuda.function.Module

        def __init__(self, **arguments: Any) -> None:
            asked.append(arguments)

        def compile(self) -> None:
            read = [asked[-1]["code"], *map(Path.read_text, headers_of(asked[-1]["code"]))]
            if any("syntax error" in text for text in read):
                raise CompileException('mine.cu(3): error: expected a ";"')

        def get_function(self, symbol: str) -> str:
            if symbol != "axpy" and "<" not in symbol:
                raise CUDADriverError("CUDA_ERROR_NOT_FOUND: named symbol not found")
            return symbol

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            pass

    cupy = types.ModuleType("cupy")
    cupy.RawModule = RawModule
    cupy.cuda = types.SimpleNamespace(
        Device=Device,
        driver=types.SimpleNamespace(CUDADriverError=CUDADriverError),
        compiler=types.SimpleNamespace(CompileException=CompileException),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(module, "missing_requirement", lambda: None)
    monkeypatch.setattr(module, "compile_failure", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    caches = (module.function, module.kernel, module._compiled)
    for cached in caches:
        cached.cache_clear()
    yield asked
    for cached in caches:
        cached.cache_clear()


def test_the_compiler_gets_a_users_file_its_folder_and_a_digest(
    axpy: Path, compiled: list[dict[str, Any]]
) -> None:
    module.kernel(axpy, "axpy", 0)
    (asked,) = compiled
    assert asked["code"] == f'#line 1 "{axpy}"\n{AXPY}'
    assert f"-I{axpy.parent}" in asked["options"]
    assert f"-I{module.KERNELS}" in asked["options"]
    assert sources.own_options([axpy])[-1] in asked["options"]


def test_a_users_kernel_that_does_not_compile_is_an_error_and_leaves_others_alone(
    axpy: Path, compiled: list[dict[str, Any]]
) -> None:
    axpy.write_text("syntax error")
    with pytest.raises(StateError) as raised:
        module.kernel(axpy, "axpy", 0)
    assert str(raised.value) == (
        f'{axpy} does not compile for sm_90a:\nmine.cu(3): error: expected a ";"'
    )
    assert module.kernels_unavailable() is None


def test_a_function_that_a_users_file_lacks_is_named(
    axpy: Path, compiled: list[dict[str, Any]]
) -> None:
    with pytest.raises(
        StateError, match=said("module-no-kernel", holds("axpy.cu"), "scale", holds("NOT_FOUND"))
    ):
        module.kernel(axpy, "scale", 0)
    axpy.unlink()
    module._compiled.cache_clear()
    with pytest.raises(StateError, match=said("sources-no", holds("/axpy.cu"))):
        module.kernel(axpy, "scale", 0)


# -- extra outputs ------------------------------------------------------------


class RowSums(fuser.BasicOperation):
    """y = x, with the sums of rows as an extra output of shape [..., 1]."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs: Any, input_: torch.Tensor, **_: Any) -> Any:
        return input_, [(input_.sum(-1, keepdim=True),)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any
    ) -> Any:
        ((grad_sums,),) = basic_op_grad_extra_outputs
        return grad_output + grad_sums, [()], [()]


class TellingRowSums(RowSums):
    """The same, with the real shape."""

    def extra_output_specs(
        self, spec: fuser.TensorSpec, extras: Any
    ) -> tuple[fuser.TensorSpec, ...]:
        return (fuser.TensorSpec((*spec.shape[:-1], 1), spec.dtype),)


class Centered(fuser.BasicOperation):
    """y = x - sums / columns; refuses sums of another shape than [..., 1]."""

    num_extra_inputs = 1

    def output_spec(self, spec: fuser.TensorSpec, extras: Any, autocast: Any) -> fuser.TensorSpec:
        if extras[0].shape != (*spec.shape[:-1], 1):
            raise fuser.InputError(f"Centered got sums of shape {extras[0].shape}.")
        return spec

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: torch.Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Any:
        return input_ - basic_op_extra_inputs[0][0] / input_.shape[-1], [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **_: Any) -> Any:
        grad = -grad_output.sum(-1, keepdim=True) / grad_output.shape[-1]
        return grad_output, [()], [(grad,)]


def centering(sums: type[RowSums]) -> fuser.Sequential:
    return fuser.Sequential(
        sums().set_extra_output_channel(0, "sums", output_to_caller=False),
        Centered().set_extra_input_channel(0, "sums"),
    )


def test_an_extra_output_that_an_op_does_not_tell_of_is_a_warning_that_names_the_method() -> None:
    class Sums(RowSums):
        pass

    x, model = torch.randn(4, 16), centering(Sums)
    with pytest.warns(
        UserWarning, match=said("diagnose-extra-plans-count", None, "Sums")
    ) as warned:
        y = model(x)
    torch.testing.assert_close(y, x - x.mean(-1, keepdim=True))
    assert [str(w.message) for w in warned] == [
        sentence(
            "diagnose-extra-plans-count",
            0,
            "Sums",
            "torch.float32",
            (4, 1),
            "torch.float32",
            (4, 16),
            "Sums",
        )
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


def test_the_real_shape_of_an_extra_output_is_planned_if_the_op_tells_it() -> None:
    x = torch.randn(4, 16)
    assumed, exact = (
        centering(op).plan(x).forward[0].bytes_per_token for op in (RowSums, TellingRowSums)
    )
    assert assumed - exact == (16 - 1) * 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(centering(TellingRowSums), x)


# -- stages -------------------------------------------------------------------


class Tanh(fuser.Activation):
    """tanh(x), whose stage a test registers."""


class Shrink(fuser.BasicOperation):
    """x / divisor, with a forward of its own and a stage."""

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.divisor = divisor

    def op_forward(self, ctx: fuser.OperationContext, input_: torch.Tensor, **_: Any) -> Any:
        return input_ / self.divisor

    def op_backward(self, ctx: fuser.OperationContext, grad_output: torch.Tensor) -> Any:
        return grad_output / self.divisor, ()

    def stage(self, *_: Any) -> tuple[Stage, None]:
        return Stage("shrink", (self.divisor,)), None


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of two headers, whose stages are registered for this test."""
    before = dict(STAGES)
    (tmp_path / "tanh.cuh").write_text(TANH)
    (tmp_path / "shrink.cuh").write_text(SHRINK)
    register(
        "tanh",
        struct="mine::Tanh",
        header=tmp_path / "tanh.cuh",
        forward=torch.tanh,
        backward=lambda dy, x: dy * (1 - torch.tanh(x).square()),
    )
    register(
        "shrink",
        struct="mine::Shrink",
        header=tmp_path / "shrink.cuh",
        forward=lambda x, divisor: x / divisor,
        backward=lambda dy, divisor: dy / divisor,
        scalars=1,
        positive=1,
        is_activation=False,
    )
    monkeypatch.setattr(Tanh, "function", Stage("tanh"), raising=False)
    yield tmp_path
    STAGES.clear()
    STAGES.update(before)


def test_ops_with_stages_of_users_are_right_on_a_cpu(stages: Path) -> None:
    x = torch.randn(4, 16)
    fp8 = (None, fuser.recipe.Float8CurrentScaling())
    check(Tanh(), x, reference=torch.tanh, recipes=fp8)
    check(Shrink(4.0), x, reference=lambda x: x / 4, recipes=fp8)


def test_a_users_ops_are_stages_of_a_chain_where_kernels_run(stages: Path) -> None:
    bias = fuser.Bias(16, device="cpu")
    torch.nn.init.normal_(bias.bias)
    model = fuser.Sequential(bias, Tanh(), Shrink(4.0))
    x = torch.randn(40, 16, requires_grad=True)
    with emulated():
        assert [step.fusion for step in model.plan(x).forward] == ["PointwiseChain"]
        y = model(x)
        y.backward(torch.ones_like(y))
    expected = x.detach().clone().requires_grad_()
    truth = torch.tanh(expected + bias.bias.detach()) / 4
    truth.sum().backward()
    torch.testing.assert_close(y, truth)
    torch.testing.assert_close(x.grad, expected.grad)
    torch.testing.assert_close(bias.bias.grad, expected.grad.sum(0))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("return fuser::tanh_at(x).value;", "return 1.5f * fuser::tanh_at(x).value;"),
        ("return fuser::tanh_at(x);", "return {fuser::tanh_at(x).value, 1.0f};"),
    ],
    ids=["value", "slope"],
)
def test_a_wrong_struct_is_found_alone_and_in_a_sequential(
    stages: Path, right: str, wrong: str
) -> None:
    """Fused and unfused ops run the same struct, so that they agree on the wrong values."""
    assert TANH.count(right) == 1
    (stages / "tanh.cuh").write_text(TANH.replace(right, wrong))
    x = torch.randn(4, 16)
    for model in (Tanh(), fuser.Sequential(fuser.Bias(16), Tanh())):
        with emulated(), pytest.raises(AssertionError, match=said("check-differs-rtol-atol")):
            check(model, x, recipes=(None,))
    (stages / "tanh.cuh").write_text(TANH)
    with emulated():
        check(fuser.Sequential(fuser.Bias(16), Tanh()), x, recipes=(None,))


def test_a_stage_of_a_user_is_in_a_store_of_the_library(stages: Path) -> None:
    model = fuser.Sequential(Shrink(4.0), Tanh(), fuser.Quantize())
    x = torch.randn(32, 64)
    with fuser.autocast(recipe=fuser.recipe.MXFP8BlockScaling()):
        plain = fuser.Sequential(*model)(x).dequantize()
        with emulated():
            made = model(x).dequantize()
    torch.testing.assert_close(made, plain, rtol=0.07, atol=0)


@needs_nvrtc
def test_a_chain_with_a_users_stage_compiles_for_gpus(stages: Path) -> None:
    symbol = (
        "fuser_pointwise<fuser::Chain<fuser::bf16, fuser::Activation<mine::Tanh<fuser::bf16>>, "
        "mine::Shrink>, 4, 8, false>"
    )
    headers = chain.headers_in(symbol)
    assert headers == (stages / "tanh.cuh", stages / "shrink.cuh")
    (stages / "all.cu").write_text(sources.source_text(module.KERNELS, "pointwise", headers))
    (found,) = nvrtc.compiled(stages, "all", [symbol], (9, 0))
    assert found.spill_bytes == 0


def test_the_compiler_includes_headers_of_the_stages_in_a_symbol(
    stages: Path, compiled: list[dict[str, Any]]
) -> None:
    module.kernel("pointwise", "fuser_pointwise<fuser::Chain<float, mine::Shrink>, 4, 4>", 0)
    module.kernel("pointwise", "fuser_pointwise<fuser::Chain<float, other::mine::Shrink>>", 0)
    module.kernel("pointwise", "fuser_pointwise<fuser::Chain<float, mine::Shrinker>>", 0)
    first, *others = compiled
    assert first["code"].startswith(f'#include "{stages / "shrink.cuh"}"\n#line 1 "fuser/')
    assert sources.own_options([stages / "shrink.cuh"])[-1] in first["options"]
    assert all(other["code"].startswith("#line 1") for other in others)
    (stages / "shrink.cuh").write_text("syntax error")
    with pytest.raises(
        StateError,
        match=said("module-does-not-compile-state-2", holds("pointwise.cu with ", "shrink.cuh")),
    ):
        module.kernel("pointwise", "fuser_pointwise<fuser::Chain<float, mine::Shrink>, 8>", 0)
    assert module.kernels_unavailable() is None


def test_a_gated_stage_of_a_user_gives_both_gradients(stages: Path) -> None:
    register(
        "bilinear",
        struct="mine::Bilinear",
        header=stages / "tanh.cuh",
        forward=lambda gate, linear: gate * linear,
        backward=lambda dy, gate, linear: (dy * linear, dy * gate),
        is_gated=True,
    )

    class Bilinear(fuser.Activation):
        function = Stage("bilinear")

    check(Bilinear(), torch.randn(3, 8), reference=lambda x: x[..., :4] * x[..., 4:])


def test_a_subclass_that_computes_otherwise_is_no_stage(stages: Path) -> None:
    class Other(Shrink):
        def op_forward(self, ctx: fuser.OperationContext, input_: torch.Tensor, **_: Any) -> Any:
            return input_ / self.divisor + 1

    model = fuser.Sequential(Other(2.0), Tanh())
    with emulated():
        plan = model.plan(torch.randn(4, 16))
    assert all(step.fusion is None for step in plan.forward)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "gelu"}, said("chain-exists-already-choose", "'gelu'", "'GELU'")),
        ({"struct": "Tanh"}, said("chain-c-type-namespace")),
        ({"struct": "fuser::Tanh"}, said("chain-c-type-namespace")),
        (
            {"struct": "mine::Shrink"},
            said("chain-belongs-needs-another", "'mine::Shrink'", "'shrink'"),
        ),
        (
            {"header": Path("nowhere.cuh")},
            said("chain-header-does-not", None, holds("nowhere.cuh")),
        ),
        ({"is_gated": True, "is_activation": False}, said("chain-gated-true-only")),
    ],
)
def test_a_stage_that_cannot_be_is_refused(
    stages: Path, arguments: dict[str, Any], words: str
) -> None:
    given = {"name": "new", "struct": "mine::New", "header": stages / "tanh.cuh"} | arguments
    with pytest.raises(fuser.InputError, match=words):
        register(given.pop("name"), forward=torch.tanh, backward=torch.tanh, **given)


def test_a_module_that_registers_its_stage_is_imported_twice(stages: Path) -> None:
    """The functions of the second import replace those of the first."""
    x = torch.randn(4, 16, requires_grad=True)
    for factor in (2.0, 3.0):
        register(
            "tanh",
            struct="mine::Tanh",
            header=stages / "tanh.cuh",
            forward=lambda x, factor=factor: factor * x,
            backward=lambda dy, x, factor=factor: dy / factor,
        )
        y = Tanh()(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y, factor * x)
        assert torch.equal(dx, torch.ones_like(x) / factor)


def test_a_kernel_and_a_stage_need_no_file_of_the_repository(tmp_path: Path) -> None:
    (tmp_path / "mine.cu").write_text('extern "C" __global__ void f() {}')
    (tmp_path / "user.py").write_text(
        "from pathlib import Path\nfrom fuser.cuda import Kernel\n"
        'print(Kernel(Path(__file__).parent / "mine.cu", "f").symbol)\n'
    )
    root = str(Path(fuser.__file__).parent.parent)
    run = python(["user.py"], {"PYTHONPATH": root}, tmp_path)
    assert run.stdout == "f\n", run.stderr
