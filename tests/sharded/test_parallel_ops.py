"""Communication in pipelines on two ranks: ops, layers, groups, plans and bad input."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_cases import (
    BIAS,
    DY,
    E5M2,
    HIDDEN,
    LINEARS,
    MLPS,
    RECIPES,
    WEIGHT,
    X,
    cases,
    mlp_parts,
    run,
    train_mlp,
    whole_mlp,
)
from paths import ROOT
from ranks import RANKS, device_type, part, results_of
from said import holds, said

import fuser
from fuser import modules
from fuser.communication import PlannedGroup, groups
from fuser.plan.cost import COLLECTIVES
from fuser.recipe import MXFP8BlockScaling
from fuser.specs import Collective, TensorSpec

TWO, FOUR = PlannedGroup(2), PlannedGroup(4)
ROW_OF_TWO: Any = {
    "device": "meta",
    "tensor_parallel_mode": "row",
    "tensor_parallel_group": TWO,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return results_of(cases, tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def of(results: dict[str, list[Any]]) -> Any:
    def find(name: str) -> list[Any]:
        for each in results[name]:
            assert isinstance(each, dict), each[1]
        return results[name]

    return find


# FP8 products of a GPU are added with 14 bits ("fast accumulation").
LIMIT = 1e-5 if device_type() == "cpu" else 2**-11


def assert_close(a: torch.Tensor, b: torch.Tensor, limit: float = LIMIT) -> None:
    error = (a - b).norm() / b.norm()
    assert error < limit, error


# -- ops -------------------------------------------------------------------------------


def test_all_gather_concatenates_rows_and_adds_gradients(of: Any) -> None:
    for rank, each in enumerate(of("gather")):
        assert torch.equal(each["y"], X)
        assert torch.equal(each["dx"], part(3 * DY, rank, 0))


def test_reduce_scatter_adds_rows_and_gathers_gradients(of: Any) -> None:
    for rank, each in enumerate(of("scatter")):
        assert torch.equal(each["y"], part(X + 2 * X, rank, 0))
        assert torch.equal(each["dx"], DY)


def test_all_reduce_adds_both_ways_or_forward_alone(of: Any) -> None:
    for rank, (both, forward) in enumerate(zip(of("reduce"), of("reduce_forward"), strict=True)):
        for each in (both, forward):
            assert torch.equal(each["y"], X + 2 * X)
        assert torch.equal(both["dx"], DY + 2 * DY)
        assert torch.equal(forward["dx"], DY * (1 + rank))


def test_collectives_between_other_ops_run_at_every_step(of: Any) -> None:
    leaf = X.clone().requires_grad_()
    y = RANKS * torch.nn.functional.silu(2 * leaf) * 0.5
    y.backward(DY)
    for rank, each in enumerate(of("in_a_pipeline")):
        assert_close(each["y"], part(y.detach(), rank, 0))
        assert_close(each["dx"], part(leaf.grad, rank, 0))


@pytest.mark.parametrize("name", RECIPES)
def test_a_gathered_input_is_quantized_as_on_one_rank(of: Any, name: str) -> None:
    linear = fuser.BasicLinear(HIDDEN, HIDDEN, device="cpu")
    with torch.no_grad():
        linear.weight.copy_(WEIGHT)
    expected = run(fuser.Sequential(linear), X, DY / RANKS, RECIPES[name])
    for rank, each in enumerate(of(f"gathered {name}")):
        assert_close(each["y"], expected["y"])
        assert_close(each["1.weight"], expected["0.weight"])
        assert_close(each["dx"], part(expected["dx"], rank, 0) * RANKS)


@pytest.mark.parametrize("name", RECIPES)
def test_a_quantized_tensor_stays_quantized_where_rows_share_no_scale(of: Any, name: str) -> None:
    is_kept = name in ("mxfp8", "block")
    for each in of(f"quantized {name}"):
        assert (each["type"] != "Tensor") == is_kept
    if is_kept:
        with torch.no_grad(), fuser.autocast(recipe=RECIPES[name]):
            expected = fuser.Quantize()(X).dequantize()
        assert torch.equal(each["values"], expected)


# -- linears ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", LINEARS)
def test_a_parallel_linear_with_a_bias_is_that_of_one_rank(of: Any, name: str) -> None:
    mode, sequence = LINEARS[name]
    op = fuser.Linear(HIDDEN, HIDDEN, device="cpu")
    with torch.no_grad():
        op.weight.copy_(WEIGHT)
        op.bias.copy_(BIAS)
    expected = run(fuser.Sequential(op), X, DY)
    is_row = mode == "row"
    for rank, each in enumerate(of(f"linear {name}")):
        y = part(expected["y"], rank, 0) if is_row and sequence else expected["y"]
        dx = part(expected["dx"], rank, 0) if not is_row and sequence else expected["dx"]
        assert_close(each["y"], y if is_row else part(y, rank, 1))
        assert_close(each["dx"], part(dx, rank, 1) if is_row else dx)
        weight, bias = (expected[f"0.basic_ops.{k}"] for k in ("0.weight", "1.bias"))
        assert_close(each["0.basic_ops.0.weight"], part(weight, rank, int(is_row)))
        assert_close(each["0.basic_ops.1.bias"], bias if is_row else part(bias, rank, 0))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", MLPS)
def test_an_mlp_trains_as_on_one_rank(of: Any, name: str, sequence: bool) -> None:
    whole = whole_mlp()
    expected = train_mlp(whole, MLPS[name], X, DY, is_shard=False)
    # Parts of weights and of the hidden activation have scales of their own.
    limit = 1e-4 if name == "unquantized" else E5M2
    for rank, each in enumerate(of(f"mlp {name} {sequence}")):
        for mine, other in zip(each["outputs"], expected["outputs"], strict=True):
            assert_close(mine, part(other, rank, 0) if sequence else other, limit)
        for parameter, value in mlp_parts(whole, rank).items():
            assert_close(each[parameter], value, limit)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", MLPS)
def test_gradients_in_parts_are_those_of_one_backward(of: Any, name: str, sequence: bool) -> None:
    limit = E5M2 if name == "delayed" else LIMIT  # whose scales change after each backward
    for each in of(f"in parts {name} {sequence}"):
        for gradient, other in zip(each["parts"], each["all"], strict=True):
            assert_close(gradient, other, limit)
        for gradient, other in zip(each["alone"], each["all"][1:], strict=True):
            assert_close(gradient, other, limit)


@pytest.mark.parametrize("name", RECIPES)
def test_rows_that_two_ranks_quantize_together_are_gathered_first(of: Any, name: str) -> None:
    linear = fuser.BasicLinear(HIDDEN, HIDDEN, device="cpu")
    with torch.no_grad():
        linear.weight.copy_(WEIGHT)
    expected = run(linear, X[88:168], DY[:80], RECIPES[name])
    ranks = of(f"odd {name}")
    found = {
        "y": torch.cat([each["y"] for each in ranks], 1),
        "dx": torch.cat([each["dx"] for each in ranks], 0),
        "weight": torch.cat([each["weight"] for each in ranks], 0),
    }
    for what, value in found.items():
        # Parts of the weight and of dy have other scales.
        assert_close(value, expected[what], 0.25 if "nvfp4" in name else E5M2)


def test_without_a_reduced_amax_each_rank_quantizes_the_gathered_values(of: Any) -> None:
    for rank, each in enumerate(of("unreduced_amaxes")):
        assert_close(each["y"], part(X @ WEIGHT.t(), rank, 1), 0.06)
        assert_close(each["weight"], part(DY.t() @ X, rank, 0), 0.1)


def test_a_users_quantizer_gets_the_values_of_all_ranks(of: Any) -> None:
    for each in of("custom_recipes"):
        library, user = each["library"], each["user"]
        assert all(library["sent"])
        assert not any(user["sent"])
        for name in ("y", "dx", "weight"):
            assert_close(user[name], library[name])


def test_ranks_with_different_scales_are_told(of: Any) -> None:
    of("different_scales")


def test_a_parallel_linear_accumulates_into_main_grad(of: Any) -> None:
    for rank, each in enumerate(of("main_grad")):
        assert_close(each["main_grad"], 1 + 3 * part(DY.t() @ X, rank, 0))


def test_a_quantized_parameter_can_be_a_part(of: Any) -> None:
    ranks = of("quantized_parameter")
    assert_close(torch.cat([each["y"] for each in ranks], 1), X @ WEIGHT.t(), 0.06)
    assert_close(torch.cat([each["dx"] for each in ranks]), DY @ WEIGHT, 0.06)


def test_under_torchs_autocast_bf16_travels(of: Any) -> None:
    ranks = of("bf16")
    y = torch.cat([each["y"] for each in ranks], 1)
    assert y.dtype is torch.bfloat16
    assert_close(y.float(), X @ WEIGHT.t(), 0.01)
    assert_close(torch.cat([each["dx"] for each in ranks]), DY @ WEIGHT, 0.01)


# -- groups ------------------------------------------------------------------------------


def test_a_backward_uses_the_group_of_its_forward_which_nothing_keeps(of: Any) -> None:
    for each in of("two_groups"):
        assert each["seen"] == [0, 1]
        assert each["kept"]
        assert not any(each["kept"])
    of("a_destroyed_group")


def test_a_copied_op_has_the_group_and_a_pickled_one_cannot(of: Any) -> None:
    for rank, each in enumerate(of("copies")):
        assert each["same"]
        for y in ("y", "again"):
            assert_close(each[y], part(X @ WEIGHT.t(), rank, 1))


WITH_A_GROUP: dict[str, Any] = {
    "AllGather": fuser.AllGather,
    "AllReduce": fuser.AllReduce,
    "ReduceScatter": fuser.ReduceScatter,
    "BasicLinear": lambda group: fuser.BasicLinear(
        8, 8, tensor_parallel_mode="row", tensor_parallel_group=group
    ),
    "Bias": lambda group: fuser.Bias(8, tensor_parallel=True, tensor_parallel_group=group),
    "MoeDispatch": lambda group: fuser.MoeDispatch(4, expert_parallel_group=group),
    "modules.Linear": lambda group: modules.Linear(8, 8, parallel_mode="row", tp_group=group),
}


@pytest.mark.parametrize("name", WITH_A_GROUP)
def test_an_op_for_some_ranks_is_not_pickled_as_one_for_all(name: str) -> None:
    make = WITH_A_GROUP[name]
    assert copy.deepcopy(make(TWO))
    with pytest.raises(fuser.StateError, match=said("groups-cannot-pickled-belongs")):
        pickle.dumps(make(TWO))
    assert pickle.loads(pickle.dumps(make(None)))


def test_parts_of_a_weight_are_initialised_in_the_trackers_context(of: Any) -> None:
    first, second = of("random_weights")
    assert not torch.equal(first["weight"], second["weight"])
    assert torch.equal(first["next"], second["next"])


# -- plans -----------------------------------------------------------------------------


def test_a_plan_has_every_collective_with_its_bytes(of: Any) -> None:
    plain, mxfp8 = (of("plans")[0][name] for name in ("plain", "mxfp8"))
    assert "all-gather input (2 ranks: 512 B/token)" in plain
    assert "reduce-scatter output (2 ranks: 256 B/token)" in plain
    assert "reduce-scatter grad_input (2 ranks: 512 B/token)" in plain
    assert "all-gather grad_output (2 ranks: 256 B/token)" in plain
    assert "Bytes sent to other ranks" in plain
    # 128 bytes and 4 scales a row.
    assert "all-gather MXFP8 E4M3 rowwise input (2 ranks: 132 B/token)" in mxfp8
    assert "all-gather MXFP8 E4M3 columnwise input (2 ranks: 132 B/token)" in mxfp8
    assert of("plans")[0]["link"] == 132


def test_a_plan_sends_the_copy_of_an_input_that_an_overridden_backward_reads() -> None:
    """The values of the rowwise copy; or the input in fp32, of which each rank sends its rows."""
    group = PlannedGroup(2)
    op = fuser.BasicLinear(
        *(128, 128),
        tensor_parallel_mode="column",
        tensor_parallel_group=group,
        sequence_parallel=True,
        device="meta",
    )
    model = fuser.Sequential(op, fuser.GELU())
    sent = {
        None: "all-gather MXFP8 E4M3 columnwise input (2 ranks: 132 B/token)",
        "dequantized": "all-gather MXFP8 E4M3 rowwise input (2 ranks: 132 B/token)",
        "high_precision": "all-gather input (2 ranks: 512 B/token)",
    }
    for override, text in sent.items():
        with fuser.autocast(recipe=MXFP8BlockScaling(backward_override=override)):
            plan = str(model.plan(torch.empty(32, 128, device="meta").requires_grad_()))
        forward, backward = plan.split("\n  backward ")
        assert "all-gather MXFP8 E4M3 rowwise input (2 ranks: 132 B/token)" in forward
        assert text in backward
        assert backward.count("all-gather") == 1


@pytest.mark.parametrize("is_sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("x", "weight")], ids="-".join)
def test_a_plan_communicates_what_the_gradients_that_are_wanted_need(
    wanted: tuple[str, ...], mode: Any, is_sequence: bool
) -> None:
    """The gradients of a column parallel linear's input are added, and so are its rows' outputs."""
    op = fuser.BasicLinear(
        *(128, 128),
        tensor_parallel_mode=mode,
        tensor_parallel_group=TWO,
        sequence_parallel=is_sequence,
        device="meta",
    )
    op.weight.requires_grad_("weight" in wanted)
    columns = 64 if mode == "row" else 128
    x = torch.empty(32, columns, device="meta", requires_grad="x" in wanted)
    added = "reduce-scatter" if is_sequence else "all-reduce"
    gathered = "all-gather"
    expected: dict[str, list[tuple[str, str]]] = {"forward": [], "backward": []}
    if mode == "row":
        expected["forward"].append((added, "output"))
        expected["backward"] += [(gathered, "grad_output")] * is_sequence
    else:
        expected["forward"] += [(gathered, "input")] * is_sequence
        expected["backward"] += [(gathered, "input")] * (is_sequence and "weight" in wanted)
        expected["backward"] += [(added, "grad_input")] * ("x" in wanted)
    key = fuser.Sequential(op).plan(x).key
    for side, communication in expected.items():
        assert [(each.kind, each.tensor) for each in op.collectives(side, key)] == communication


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("name", RECIPES)
def test_quantized_rows_travel_as_bytes_and_scales(of: Any, name: str, mode: str) -> None:
    for each in of("traffic"):
        plain, taken = (sum(each[f"{recipe} {mode}"]) for recipe in ("unquantized", name))
        # A row parallel linear gathers dy once in bf16, and both copies of formats of blocks.
        has_two_copies = mode == "row" and name not in ("current", "delayed")
        limit = 0.3 if name == "nvfp4" else 0.55
        assert taken <= limit * plain * (1 + has_two_copies), (taken, plain)


def test_the_example_of_the_document_prints_the_plan_that_the_document_has(of: Any) -> None:
    if device_type() != "cpu":
        pytest.skip("the document has the plan of a CPU")
    text = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    for each in of("document"):
        assert f"```\n{each['printed']}```\n" in text


def test_the_bytes_of_collectives_are_those_of_a_ring() -> None:
    spec = TensorSpec((4, 8), torch.bfloat16)  # 64 bytes
    sent = {kind: Collective(kind, "input", 4).nbytes(spec) for kind in COLLECTIVES}
    of_parts = {"all-reduce": 2 * 3 * 16, "all-to-all": 3 * 16}
    assert sent == {"all-gather": 3 * 64, "reduce-scatter": 3 * 64, **of_parts}


def test_a_pipeline_that_communicates_is_recorded_with_its_groups_and_not_captured(of: Any) -> None:
    for each in of("plans"):
        assert each["recordable"]
        assert each["groups"] == [1, 0, 1, 0, 0, 1]
    for each in of("plans"):
        assert "the op '0' with process groups" in each["captured"]
        assert "the op 'ops.1.basic_ops.0' with process groups" in each["captured layer"]


def test_a_fusion_that_would_not_communicate_is_refused(of: Any) -> None:
    user, bias = (of("plans")[0][name] for name in ("user", "bias"))
    assert "op 0 (BasicLinear) communicates, which the fusion does not do: all-gather" in user
    registered = of("plans")[0]["registered"]
    assert "registered fusion _Fusion cannot run ops 0-1: op 0 (BasicLinear)" in registered
    assert "ForwardLinearBiasActivation" in bias.partition("backward")[0]


# -- bad input -------------------------------------------------------------------------


def test_bad_input_is_a_sentence_with_the_op_and_the_numbers(of: Any) -> None:
    ranks = of("bad_input")
    for found in ranks:
        assert "ReduceScatter scatters 7 rows" in found["rows of an op"]
        assert "7 is not a multiple of 2" in found["rows of an op"]
        assert "BasicLinear scatters 9 rows" in found["rows of a linear"]
        assert "AllGather" in found["one dimension"]
        assert "(128,)" in found["one dimension"]
        assert "BasicLinear" in found["one dimension of a linear"]
        assert "must be 64 (128 over 2 ranks)" in found["features"]
        assert "LayerNormLinear got parallel_mode='row' over 2 ranks" in found["row after a norm"]
        assert "set_parallel_mode=True" in found["two modes"]
    assert "sharded over 2 ranks, and a group of 1" in ranks[0]["alone"]
    assert (
        "BasicLinear got a process group of which rank 1 is not a member" in ranks[1]["no member"]
    )
    assert "AllReduce got a process group" in ranks[1]["no member of an op"]


def test_ranks_that_differ_all_raise_at_the_first_call(of: Any) -> None:
    first, second = of("different_ranks")
    assert first == second
    assert "rank 0 has recipe Float8CurrentScaling" in first["recipes"]
    assert "rank 1 has recipe MXFP8BlockScaling" in first["recipes"]
    assert "input" not in first["recipes"]  # what is equal on all ranks is not named
    assert "input (64, 128) in float32" in first["rows"]
    assert "input (65, 128) in float32" in first["rows"]
    assert "gradients (False, True)" in first["gradients"]
    assert first["op"].startswith("AllReduce communicates, and its ranks differ")


def test_ranks_that_differ_in_a_later_call_all_raise_on_a_cpu(of: Any) -> None:
    first, second = of("ranks_that_differ_later")
    assert first == second
    if first:
        assert "rank 0 has input (32, 128) in float32; rank 1 has input (64" in first["rows"]
        assert "rank 0 has recipe Float8CurrentScaling(); rank 1 has recipe None" in first["recipe"]


def test_an_input_that_is_not_in_memory_as_it_reads_is_gathered_as_it_reads(of: Any) -> None:
    ranks = of("quantized_outside_autocast")
    x = torch.cat([each["x"] for each in ranks])
    for rank, each in enumerate(ranks):
        assert_close(each["y"], part(x @ WEIGHT.t(), rank, 1))
        assert_close(each["weight"], part(DY.t() @ x, rank, 0))
    for each in of("negated"):
        assert torch.equal(each["y"], -X)


def test_a_mesh_is_a_group(of: Any) -> None:
    for rank, each in enumerate(of("mesh")):
        assert_close(each["y"], part(X @ WEIGHT.t(), rank, 1))
        assert "AllGather got a device mesh of 2 dimensions" in each["two"]
        assert "AllGather got [0, 1] as its process group" in each["ranks"]


def test_communication_runs_beside_the_other_product_of_backward(of: Any) -> None:
    for each in of("order"):
        assert each["seen"] == ["gather", "dgrad", "scatter", "wait", "wgrad", "wait"]


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            fuser.Linear(8, 4, **ROW_OF_TWO),
            ["Linear(8, 4, row parallel over 2 ranks)"],
        ),
        (
            fuser.BasicLinear(8, 4, **ROW_OF_TWO),
            ["BasicLinear(in_features=8, out_features=4, row parallel over 2 ranks)"],
        ),
        (
            fuser.Linear(8, 4, **{**ROW_OF_TWO, "tensor_parallel_mode": "column"}),
            ["Linear(8, 4, column parallel over 2 ranks)"],
        ),
        (
            modules.Linear(8, 4, **ROW_OF_TWO),
            ["Linear(in_features=8, out_features=4, row parallel over 2 ranks)"],
        ),
        (
            modules.LayerNormMLP(8, 16, device="meta", set_parallel_mode=True, tp_group=TWO),
            ["activation='gelu', column and row parallel over 2 ranks)"],
        ),
    ],
)
def test_a_repr_has_the_sizes_of_all_ranks_and_their_number(module: Any, said: list[str]) -> None:
    assert all(each in repr(module) for each in said)


@pytest.mark.parametrize("mode", ["row", "column"])
def test_a_linear_that_gets_other_features_says_whether_they_are_a_part(mode: str) -> None:
    linear = fuser.Linear(8, 4, **{**ROW_OF_TWO, "tensor_parallel_mode": mode})
    words = {
        "row": said("basic-linear-input-shape-last", holds("Linear(8, 4)"), (3, 7), 4, 8, 2),
        "column": said("grouped-linear-shape-last-dimension", "Linear(8, 4)", (3, 7), 8),
    }[mode]
    with pytest.raises(fuser.InputError, match=words):
        linear(torch.randn(3, 7, device="meta"))


def test_a_group_without_torch_distributed_is_refused() -> None:
    group = dist.ProcessGroup(0, 2)  # type: ignore[call-arg]
    with pytest.raises(
        fuser.StateError, match=said("groups-communicates-torch-distributed", holds("BasicLinear"))
    ):
        fuser.BasicLinear(4, 4, tensor_parallel_mode="row", tensor_parallel_group=group)
    with pytest.raises(
        fuser.StateError, match=said("groups-communicates-torch-distributed", holds("AllGather"))
    ):
        fuser.AllGather(group)


@pytest.mark.parametrize("given", ["tp", 0, [0, 1], object()])
def test_what_is_no_group_is_named_before_torch_distributed_is_initialised(given: Any) -> None:
    made = {
        "autocast": lambda: fuser.autocast(amax_reduction_group=given),
        "BasicLinear": lambda: fuser.BasicLinear(
            4, 4, tensor_parallel_mode="row", tensor_parallel_group=given
        ),
        "AllGather": lambda: fuser.AllGather(given),
        "MoeDispatch": lambda: fuser.MoeDispatch(4, expert_parallel_group=given),
    }
    for name, make in made.items():
        words = rf"^{name} got {re.escape(repr(given))} as its process group"
        with pytest.raises(fuser.InputError, match=words):
            make()


def test_an_op_of_all_ranks_that_is_made_before_they_are_known_warns_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    groups._warn_of_ranks_without_groups.cache_clear()
    fuser.Linear(8, 8)
    fuser.Linear(8, 8, **ROW_OF_TWO)
    fuser.MoeDispatch(4)
    assert not recwarn.list
    fuser.Linear(8, 8, tensor_parallel_mode="column")
    fuser.AllReduce()
    (warning,) = recwarn.list
    assert "WORLD_SIZE is 4: every process computes the whole op" in str(warning.message)
    groups._warn_of_ranks_without_groups.cache_clear()
    monkeypatch.setenv("WORLD_SIZE", "1")
    fuser.Bias(8, tensor_parallel=True)
    assert len(recwarn.list) == 1


def test_without_process_groups_ops_communicate_nothing() -> None:
    model = fuser.Sequential(fuser.AllGather(), fuser.AllReduce(), fuser.ReduceScatter())
    assert torch.equal(run(model, X, DY)["dx"], DY)
    assert "all-" not in str(model.plan(X))


@pytest.mark.parametrize("kind", [fuser.AllGather, fuser.ReduceScatter, fuser.AllReduce])
def test_a_collective_takes_no_group_of_another_size(kind: Any) -> None:
    op, another = kind(TWO), PlannedGroup(2)
    for group, ranks in ((FOUR, 4), (None, 1)):
        words = said("collectives-made-make-op", kind.__name__, 2, ranks)
        with pytest.raises(fuser.InputError, match=words):
            op.process_group = group
        assert op.process_group is TWO
    op.process_group = another
    assert op.process_groups == (another,)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rows", range(7))
def test_rows_that_ranks_do_not_divide_are_refused(rows: int, ranks: int) -> None:
    """Fewer rows than ranks too; but not an input without rows."""
    group = PlannedGroup(ranks)
    linear = fuser.BasicLinear(
        8 * ranks,
        8,
        tensor_parallel_mode="row",
        tensor_parallel_group=group,
        sequence_parallel=True,
    )
    x = torch.empty(rows, 8)
    for op in (fuser.ReduceScatter(group), linear):
        model = fuser.Sequential(op)
        if rows % ranks == 0:
            assert model.plan(x).forward
            continue
        with pytest.raises(fuser.InputError, match=f"scatters {rows} rows .* {ranks} ranks"):
            model.plan(x)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_features_that_ranks_do_not_divide_are_refused(size: int) -> None:
    makes: dict[str, Any] = {
        "Bias's size": lambda: fuser.Bias(size, tensor_parallel=True, tensor_parallel_group=FOUR),
        **{
            f"BasicLinear's {name}": lambda mode=mode, sizes=sizes: fuser.BasicLinear(
                *sizes, device="meta", tensor_parallel_mode=mode, tensor_parallel_group=FOUR
            )
            for name, mode, sizes in (
                ("in_features", "row", (size, 8)),
                ("out_features", "column", (8, size)),
            )
        },
        "Linear's in_features": lambda: fuser.Linear(
            size, 8, device="meta", tensor_parallel_mode="row", tensor_parallel_group=FOUR
        ),
        "LayerNormMLP's ffn_hidden_size": lambda: modules.LayerNormMLP(
            8, size, device="meta", set_parallel_mode=True, tp_group=FOUR
        ),
    }
    for name, make in makes.items():
        with pytest.raises(fuser.InputError, match=f"{name} is {size}, and 4 ranks"):
            make()


def test_shapes_are_known_on_meta_and_of_no_rows(of: Any) -> None:
    for each in of("meta"):
        assert each == {"shape": (8, 64), "empty": (0, 64)}
