"""What collectives and agreements ask of torch: which tensors, when, and how long these live."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from said import said

import fuser
from fuser.communication import agreement, collectives, groups
from fuser.communication.agreement import Agreement
from fuser.communication.collectives import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from fuser.recipe import Float8CurrentScaling, MXFP8BlockScaling
from fuser.specs import Collective

GROUP: Any = object()
RANKS = 2
STARTS: dict[str, Callable[[torch.Tensor], Pending[torch.Tensor]]] = {
    "all-gather": lambda x: start_all_gather(x, GROUP),
    "all-gather of columns": lambda x: start_all_gather(x, GROUP, dim=1),
    "reduce-scatter": lambda x: start_reduce_scatter(x, GROUP),
    "all-to-all": lambda x: start_all_to_all(x, GROUP),
    "all-reduce": lambda x: start_all_reduce(x, GROUP),
}
every_start = pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)


class Calls(list[tuple[Any, ...]]):
    """The arguments of calls of torch's collectives, and how often one was waited for."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    noted = Calls()

    def note(*args: Any, group: Any, async_op: bool) -> Any:
        assert group is GROUP
        assert async_op
        noted.append(args)
        return noted

    for holder, name in (
        (collectives, "_all_gather"),
        (collectives, "_reduce_scatter"),
        (dist, "all_to_all_single"),
        (dist, "all_reduce"),
    ):
        monkeypatch.setattr(holder, name, note)
    monkeypatch.setattr(dist, "get_world_size", lambda group: RANKS)
    return noted


@every_start
def test_what_a_collective_reads_is_contiguous_and_lives_until_it_is_waited_for(
    start: Callable[[torch.Tensor], Pending[torch.Tensor]], calls: Calls
) -> None:
    x = torch.randn(4, 6).t()
    pending = start(x)
    ((*_, sent),) = ([a for a in args if isinstance(a, torch.Tensor)] for args in calls)
    assert sent.is_contiguous()
    assert torch.equal(sent, x)
    reference = weakref.ref(sent)
    calls.clear()
    del sent
    assert reference() is not None
    assert calls.waits == 0
    pending.wait()
    assert calls.waits == 1


@every_start
@pytest.mark.parametrize(
    "x", [torch.empty(0, 4), torch.empty(4, 4, device="meta")], ids=["empty", "meta"]
)
def test_nothing_is_sent_of_what_has_no_elements(
    start: Callable[[torch.Tensor], Pending[torch.Tensor]], x: torch.Tensor, calls: Calls
) -> None:
    y = start(x).wait()
    assert not calls
    assert calls.waits == 0
    assert (y.dtype, y.device) == (x.dtype, x.device)


def test_an_all_to_all_has_the_rows_of_its_sizes_also_without_any_of_its_own(calls: Calls) -> None:
    x = torch.randn(6, 3)
    assert start_all_to_all(x, GROUP, (2, 4), (1, 3)).wait().shape == (4, 3)
    assert start_all_to_all(x[:0], GROUP, (0, 0), (1, 3)).wait().shape == (4, 3)
    assert start_all_to_all(x, GROUP).wait().shape == (6, 3)
    assert [args[2:] for args in calls] == [([1, 3], [2, 4]), ([1, 3], [0, 0]), (None, None)]


def input_on(device: str) -> Any:
    """What an agreement reads of a tensor on a device that need not be here."""
    return SimpleNamespace(
        device=torch.device(device), is_meta=False, shape=(2, 4), dtype=torch.bfloat16
    )


def test_ranks_compare_at_every_call_on_a_cpu_and_once_for_a_recipe_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(agreement, "_compare", lambda *args: compared.append(args))
    agreed = Agreement()

    def comparisons(device: str, recipe: Any = None, by: Agreement = agreed) -> int:
        compared.clear()
        for _ in range(2):
            by.check("Op", GROUP, recipe, input_on(device))
        return len(compared)

    assert comparisons("cpu") == 2
    assert comparisons("cuda", MXFP8BlockScaling()) == 1
    assert comparisons("cuda", MXFP8BlockScaling()) == 0
    assert comparisons("cuda", Float8CurrentScaling()) == 1
    assert comparisons("cuda", MXFP8BlockScaling(), copy.deepcopy(agreed)) == 1
    monkeypatch.setattr(agreement, "are_ranks_debugged", lambda: True)
    assert comparisons("cuda", MXFP8BlockScaling()) == 2


def test_ranks_compare_within_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(dist, "all_reduce", lambda *args, group=None: asked.append(group))
    Agreement().check("Op", GROUP, None, torch.empty(2, 4))
    assert asked == [GROUP]


def test_a_torch_that_is_built_without_groups_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.delattr(dist, "is_initialized")
    assert not groups.is_initialized()


@pytest.fixture
def has_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the second of two."""
    monkeypatch.setattr(groups, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", rank_of)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=WORLD))


_made: Any = dist.ProcessGroup
WORLD, DESTROYED = _made(1, 2), _made(0, 1)


def rank_of(group: Any = None) -> int:
    if group is DESTROYED:
        raise ValueError("it is not registered")
    return 1


@pytest.mark.usefixtures("has_groups")
def test_a_group_of_others_and_one_that_was_destroyed_are_refused_each_by_its_sentence() -> None:
    assert groups.resolved("Op", None) is groups.resolved("Op", WORLD) is WORLD
    with pytest.raises(fuser.InputError, match=said("groups-rank-member-every", "Op", 1)):
        groups.resolved("Op", dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(fuser.StateError, match=said("groups-communicates-destroyed-make", "Op")):
        groups.resolved("Op", DESTROYED)
    with pytest.raises(
        fuser.InputError, match=said("groups-takes-torch-distributed", "Op", repr("tp"))
    ):
        groups.resolved("Op", "tp")


def test_without_groups_a_process_is_rank_0() -> None:
    assert groups.rank_in("Op", None) == groups.rank_in("Op", groups.PlannedGroup(4)) == 0


@pytest.mark.usefixtures("has_groups")
def test_with_groups_a_process_has_the_rank_of_all_of_them() -> None:
    assert groups.rank_in("Op", None) == groups.rank_in("Op", WORLD) == 1


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
def test_what_kernels_read_has_travelled_before_them(kind: str) -> None:
    tensors = ("input", "output", "grad_output", "grad_input", "rows", "grad of rows")
    first = {name for name in tensors if Collective(kind, name, RANKS).is_first}
    assert first == {
        "all-gather": set(tensors),
        "all-to-all": {"input", "grad_output", "grad of rows"},
    }.get(kind, set())


@pytest.mark.parametrize(
    ("rank", "local", "count", "ranks", "may_cross"),
    [
        (0, "0", "4", [0, 1, 2, 3], False),
        (3, "3", "4", [0, 1, 2, 3], False),
        (6, "2", "4", [4, 6], False),
        (2, "2", "4", [2, 4], True),
        (4, "0", "4", [2, 4], True),
        (8, "0", "16", [7, 8], True),  # after a host of eight ranks
        (0, "0", "1", [0, 1], True),
        (0, "", "2", [0, 1], True),
        (0, "0", "", [0, 1], True),
    ],
)
def test_ranks_may_be_on_several_hosts_unless_torchrun_started_all_on_one(
    rank: int,
    local: str,
    count: str,
    ranks: list[int],
    may_cross: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", count)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(groups, "ranks_of", lambda op, group: ranks)
    assert groups.may_cross_hosts("MoeDispatch", None) is may_cross
    assert groups.may_cross_hosts("MoeDispatch", groups.PlannedGroup(2))
