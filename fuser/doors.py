"""The doors of the core: questions that the core asks, and a wing may answer in its place.

A class here is a door: its methods are what the core asks, and what they do here is the answer
without a wing. The core calls ``NAME.guest.method(...)`` and knows no wing. A wing subclasses the
class, and opens the door with an object of it as soon as it is imported::

    NAME.open(MyAnswers())

Fusions of wings have a door of their own, ``register`` in ``fused_ops/catalog.py``.

Several wings may open one door, each for some of its questions: a class leaves the others to
``super()``, and an object has no state.

A product also adds members to classes of the core, and is loaded when one of them is first used.
``tests/rooms.py`` says which files are the core, a wing or a product.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Literal, TypeVar

import torch

from fuser.errors import InputError, InputTypeError, StateError
from fuser.torch_private import breaks_graph

Answers = TypeVar("Answers")
Result = TypeVar("Result")
Fill = Callable[[torch.Tensor], object]


class Door(Generic[Answers]):
    """A door: who answers the questions of one class.

    Parameters
    ----------
    default
        Answers while no wing has opened the door.
    product
        A module that opens the door, loaded at the first question; without it the default answers.
    """

    def __init__(self, default: Answers, product: str | None = None) -> None:
        self.default = default
        self.product = product
        if product is None:
            self.guest = default

    @functools.cached_property
    def guest(self) -> Answers:
        """Who answers."""
        if self.product is not None:
            try:
                importlib.import_module(self.product)
            except ModuleNotFoundError as error:
                if not self.product.startswith(str(error.name)):
                    raise  # the product is there, and lacks something
        guest: Answers = vars(self).get("guest", self.default)
        return guest

    def open(self, guest: Answers) -> None:
        """Let ``guest`` answer from now on.

        Raises
        ------
        InputTypeError
            If it is not an object of the door's class.
        """
        kind = type(self.default)
        if not isinstance(guest, kind):
            raise InputTypeError(f"a door of {kind.__name__} takes an object of it, got {guest!r}.")
        earlier = vars(self).get("guest", self.default)
        if earlier is not self.default:
            guest = type(kind.__name__, (type(guest), type(earlier)), {})()
        self.guest = guest


@breaks_graph
def _outside(container: torch.nn.Module, x: torch.Tensor, extras: Any, keywords: Any) -> Any:
    return container.forward(x, *extras, **keywords)


class PassRunner:
    """How the passes of a plan run: here as one autograd node, by the plan's own code."""

    def compiled_plan(self, kind: Any, planned: Any, graph: Any, *contents: Any) -> Any:
        """A plan ready to be called, an object of the class ``kind`` or of another one.

        ``graph`` is bound to the plan's key, and ``contents`` are further arguments of the class.
        """
        return kind(planned.plan, *contents, planned.forward, planned.backward)

    @staticmethod
    def saving(ops: Any, key: Any, limit: Any) -> Any:
        """``key``, that of a plan of ``ops``, with what forward keeps for backward under a limit.

        Here all that backward reads.
        """
        return key

    @staticmethod
    def budget(memory_budget: float | None) -> Any:
        """The ``MemoryBudget`` of a number that a user has given.

        Raises
        ------
        InputError
            If there are none, as here.
        """
        raise InputError(
            f"memory_budget got {memory_budget!r}; without memory plans it must be left out."
        )

    @staticmethod
    def keeping_inputs(model: Any, forward: Callable[..., Any], inputs: Any, op_kwargs: Any) -> Any:
        """``forward(model, *inputs, op_kwargs=op_kwargs)`` under a budget of 0."""
        return forward(model, *inputs, op_kwargs=op_kwargs)

    def recorded(self, plan: Any, steps: Any) -> Any:
        """What repeats the passes of a compiled plan, which has these steps; None: its code runs.

        It has the methods of ``RecordedPasses``.
        """
        return None

    def replays(self, plan: Any) -> Sequence[tuple[str | None, str]]:
        """How earlier calls of a compiled plan have run: sides, None for both, and texts."""
        return ()

    @staticmethod
    def constant_launches(
        cache: dict[Any, Any],
        what: Hashable,
        tensors: Sequence[torch.Tensor],
        function: Callable[[], Result],
    ) -> tuple[bool, Result]:
        """Call ``function``, which launches kernels over the same tensors at most calls.

        ``cache`` is of the tensors' owner, and keeps what is known of earlier calls. Returns
        whether launches were repeated, and ``function`` was not called; and the result, tensors in
        tuples.
        """
        return False, function()

    @staticmethod
    def repeated_launches(
        cache: dict[Any, Any],
        what: Hashable,
        tensors: Sequence[torch.Tensor],
        function: Callable[[], Result],
        objects: Sequence[object] = (),
    ) -> tuple[bool, Result]:
        """Call ``function``, which launches kernels over tensors of the same layouts at most calls.

        The rest is as in :meth:`constant_launches`; ``objects`` are process groups.
        """
        return False, function()

    @staticmethod
    def new_op(op: Any) -> None:
        """An op was made, copied or loaded, and has a new number."""

    @staticmethod
    def traced_call(container: torch.nn.Module, x: torch.Tensor, extras: Any, keywords: Any) -> Any:
        """The call of a container or an op that torch.compile traces: here between two graphs.

        It gets the input, the extra inputs, and keyword arguments of the forward.
        """
        return _outside(container, x, extras, keywords)


PASSES = Door(PassRunner())


class Observer:
    """What a plan that is shown says of one call, besides what holds for every call."""

    calls: Callable[[], Any] | None = None
    """Returns what answers the calls of pipelines on this thread, or None; None if all run."""

    @staticmethod
    def kept(graph: Any, forward: Any, cuts: Sequence[int] = ()) -> tuple[Any, ...]:
        """The tensors that backward reads of ``forward``, the steps that run; here none is listed.

        ``cuts`` are the ops before which another autograd node begins.
        """
        return ()

    def notes(self, graph: Any, plan: Any, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Fields of ``plan`` that depend on the tensors of a call; ``graph`` is that call's."""
        return {}

    def costs(
        self,
        graph: Any,
        plan: Any,
        key_under: Any,
        registered: Any,
        target: Any = None,
        *,
        is_known: bool = False,
    ) -> dict[str, Any]:
        """Fields of ``plan`` about what other choices would cost; may bind ``graph``.

        ``key_under`` gives the plan's key under another limit of what is kept; ``registered`` and
        ``target`` are those of the planner. ``is_known``: an earlier call has made the plan, which
        may have had other rows.
        """
        return {}


OBSERVER = Door(Observer())


class OfProduct:
    """A member that a module of a product defines, which is loaded when it is first used."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, instance: object, owner: type) -> Any:
        setattr(self.owner, self.name, vars(importlib.import_module(self.module))[self.name])
        return getattr(owner if instance is None else instance, self.name)


class View:
    """What a program sees of a quantizer."""

    def of(self, value: Any, before: Any) -> Any:
        """The object for a quantizer; ``before`` is the one of this place before, or None."""
        return value


VIEW = Door(View(), product="fuser.te.quantizers")


class ParameterSource:
    """Where the parameters of ops and the amaxes of their scales come from: from this process."""

    def amaxes(self, states: Mapping[Any, Any]) -> Mapping[Any, torch.Tensor | None] | None:
        """The states of delayed scaling whose step ends, with the amaxes that it recorded.

        ``states`` are those that recorded in this process, with their process groups. None for an
        amax, or for all: those in the states.
        """
        return None

    def parallelism(self, mode: Literal["column", "row"], ranks: int, has_shards: bool) -> Any:
        """How a linear is spread over ``ranks`` ranks: two or more.

        Raises
        ------
        StateError
            As long as nothing spreads linears.
        """
        raise StateError(
            f"A {mode} parallel linear over {ranks} ranks needs fuser.distributed, which was not "
            "imported."
        )

    def local_parts(
        self, ops: Sequence[Any], places: Any, parameters: Sequence[torch.Tensor]
    ) -> AbstractContextManager[None] | None:
        """The context in which a call reads other tensors in the ``places`` of ``parameters``.

        None if it reads the parameters of ``ops`` as they are.
        """
        return None

    def are_gathered(self, ops: Sequence[Any], places: Any) -> bool:
        """Whether a call gets other parameters, which were gathered from those in ``places``."""
        return False

    def memory_of(self, parameters: Sequence[torch.Tensor], before: Any) -> Any:
        """The memory of parameters that is freed between passes; None if nothing frees it.

        ``before``, an earlier result, if it is the same memory.
        """
        return None

    def initialise(self, op: Any, name: str, fill: Fill, quantizer: Any) -> None:
        """Initialise the ``DTensor`` parameter ``name`` of ``op``; None does not quantize it."""
        fill(getattr(op, name))


PARAMETERS = Door(ParameterSource())
