"""A sample of the tests on other machines, which are imitated; CONTRIBUTING.md has the whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import other_sums
import pytest
from paths import TESTS

MACHINES = {
    "no vectors, other orders": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        other_sums.VARIABLE: "1",
    },
    "no bf16, other threads": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OMP_NUM_THREADS": "2",
    },
}
FILES = (
    "recipes/test_quantized_operands.py",
    "experts/test_grouped_linear.py",
    "ops/test_ops.py",
)
# Products of quantized weights without a recipe, of groups under each recipe, and of each dtype.
SAMPLE = (
    "weights_compute_as_their_values and (gelu-current-bf16 or linear-block-bf16) "
    "or each_expert_of_a_stack and block "
    "or each_group_equals_a_linear_of_its_own and None and 40 "
    "or every_gradient_are_no_worse_than_torch and 3-D and Linear"
)


def output_of(machine: str, *arguments: str) -> str:
    """What Python prints there; an error has all of it."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"
    }
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=TESTS,
        env={**environment, **MACHINES[machine], "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.parametrize("machine", MACHINES)
def test_a_sample_of_the_tests_passes(machine: str) -> None:
    pytest_options = ("-m", "pytest", "-n0", "--no-header", "-p", "no:cacheprovider")
    printed = output_of(machine, *pytest_options, *FILES, "-k", SAMPLE)
    assert int(re.search(r"(\d+) passed", printed)[1]) >= 15


SUMS = """
import torch, other_sums
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    a, b = torch.randn(64, 128).to(dtype), torch.randn(128, 64).to(dtype)
    c = torch.randn(64).to(dtype)
    whole = torch.randn(64 * 128 + 1).to(dtype)
    other = b.t().contiguous().t()
    assert torch.equal(a @ b, a.clone() @ b.clone())
    assert not torch.equal(a @ b, a @ other)
    assert not torch.equal(torch.addmm(c, a, b), torch.addmm(c, a, other))
    assert not torch.equal((a @ b)[:48], a[:48] @ b)
    shifted = whole[1:].view(64, 128)
    assert not torch.equal(shifted @ b, shifted.clone() @ b)
    error = (a @ b - a.double() @ b.double()).abs().max()
    assert error <= 256 * torch.finfo(dtype).eps
    integers, others = (torch.randint(-8, 8, shape).to(dtype) for shape in ((64, 128), (128, 64)))
    assert torch.equal(integers @ others, integers @ others.t().contiguous().t())
    assert torch.equal(integers.sum(1), integers.t().contiguous().t().sum(1))
a = torch.randn(64, 128)
assert not torch.equal(a.sum(1), a.t().contiguous().t().sum(1))
assert not torch.equal(a.mean(1), a.t().contiguous().t().mean(1))
assert torch.equal(a.sum(1), a.view(8, 8, 128).sum(2).flatten())
assert not torch.equal(a.sum(1)[:32], a[:32].sum(1))
batch, b = torch.randn(4, 64, 128), torch.randn(128, 64)
torch.testing.assert_close(torch.vmap(lambda a: (a @ b).sum(0))(batch), (batch @ b).sum(1))
with torch.profiler.profile(profile_memory=True) as counted, other_sums.own_order():
    a @ b
(product,) = (event for event in counted.key_averages() if event.key == "aten::mm")
assert product.cpu_memory_usage == 4 * 64 * 64
"""


def test_other_layouts_have_other_orders_of_sums_and_equal_ones_the_same() -> None:
    output_of("no vectors, other orders", "-c", SUMS)


@pytest.mark.parametrize(("machine", "capability"), zip(MACHINES, ("DEFAULT", "AVX2"), strict=True))
def test_torch_sees_the_other_machine(machine: str, capability: str) -> None:
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    assert output_of(machine, "-c", code).strip() == capability
