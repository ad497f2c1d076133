"""The tensors of passes of compiled graphs, and what is known of them without their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fuser.errors import StateError
from fuser.op import OperationContext
from fuser.recipe import Recipe
from fuser.runtime.graph_parameters import QUANTIZED, GraphParameters
from fuser.torch_private import in_own_storage, storage_of

Tensors: TypeAlias = Sequence[torch.Tensor]
Sizes: TypeAlias = Sequence["int | torch.SymInt"]
Ends: TypeAlias = "tuple[int, ...] | None"
"""The ends of the ops' saved tensors; None of a recorded forward."""
Contexts: TypeAlias = list[tuple[type[OperationContext], dict[str, Any]]]
"""The class and the attributes of each op's context."""
Specs: TypeAlias = tuple[Any, ...]
"""Shape and dtype of every extra output."""
TensorFacts: TypeAlias = tuple[str, torch.dtype, bool]
"""Of a tensor: the name of its class, its dtype, and whether it requires a gradient.

A parameter that is quantized, or joins several tensors, has its text in place of the name
(:class:`GraphParameters`)."""


class Facts(NamedTuple):
    """What a plan depends on besides the structure of its pipeline."""

    recipe_key: str
    is_grad_enabled: bool
    device: str
    no_kernels: str | None
    """Why fuser's kernels do not run on the device; None if they run."""
    autocast: torch.dtype | None
    summed: tuple[int | None, ...]
    """The number of the process group over which the gradient of each parameter is added."""
    first: tuple[int, ...]
    """For each extra input, the first one that is the same tensor."""
    tensors: tuple[TensorFacts, ...]
    """The input, the parameters, and the extra inputs."""
    training: tuple[bool, ...]
    rounds: bool
    """Whether the recipe rounds at random."""
    is_checkpointed: bool
    """Whether a checkpoint in the graph runs the forward again."""
    limit: tuple[float | None, bool, bool]
    """What is kept for backward: the fields of a ``Limit``."""
    registered: str = ""
    """The process and the number of its functions that plan or run; empty for fuser's own."""


class GivenTensors(NamedTuple):
    """The tensors that a graph gives to a forward; of some parameters several."""

    x: torch.Tensor
    params: Tensors
    """Of quantized ones the buffers, and of those that join several tensors these."""
    extras: Tensors
    seeds: Tensors
    """Those of each dropout."""
    host: Tensors
    """On the CPU: the numbers of the calls of ops with quantizers, and the seed of roundings."""

    def distinct(self, first: Sequence[int]) -> GivenTensors:
        """The same tensors, each another object; but ``extras[i]`` is ``extras[first[i]]``."""
        tensors = (self.x, *self.params, *self.extras)
        is_distinct = len(set(map(id, tensors))) == len(tensors)
        if is_distinct and len(set(first)) == len(first):
            return self
        seen: set[int] = set()
        distinct: list[torch.Tensor] = []
        for tensor in tensors:
            distinct.append(tensor.detach() if id(tensor) in seen else tensor)
            seen.add(id(tensor))
        count = 1 + len(self.params)
        extras = [distinct[count + i] for i in first]
        return self._replace(x=distinct[0], params=distinct[1:count], extras=extras)

    def in_own_storages(self) -> GivenTensors:
        """The same tensors, but the input and extra inputs share no storage with other ones.

        So a view that an op saves is one of its own input, whatever a caller's tensors share.
        """
        params = set(map(storage_of, self.params))
        seen = {storage_of(self.x): self.x}
        x = in_own_storage(self.x) if storage_of(self.x) in params else self.x
        extras: list[torch.Tensor] = []
        for place, extra in enumerate(self.extras):
            storage, same = storage_of(extra), [e is extra for e in self.extras].index(True)
            if same < place:
                extras.append(extras[same])
            else:
                is_shared = storage in seen or storage in params
                extras.append(in_own_storage(extra) if is_shared else extra)
            seen.setdefault(storage, extra)
        return self._replace(x=x, extras=extras)

    def sizes(self) -> list[int | torch.SymInt]:
        """Sizes and strides, which are numbers or symbols."""
        tensors = (self.x, *self.params, *self.extras)
        return [size for tensor in tensors for size in [*tensor.shape, *tensor.stride()]]

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors that backward may read."""
        return (self.x, *self.params, *self.extras, *self.seeds)


class GivenBack(NamedTuple):
    """What a graph gives to a backward."""

    sizes: Sizes
    """Those of :meth:`GivenTensors.sizes` in forward."""
    inputs: Sequence[int]
    outputs: Sequence[int]
    """The numbers of the inputs and of the outputs among the saved tensors."""
    grads: Sequence[torch.Tensor | None]
    saved: Tensors
    """The saved tensors that forward returned, then the inputs and the outputs among them."""
    params: Tensors
    host: Tensors
    """Both as in :class:`GivenTensors`."""


class Place(NamedTuple):
    """Where a saved tensor is: it is, or views, an input, an output or another saved tensor."""

    kind: str
    """"input", "output", "saved", or "parameter" for one that joins several inputs."""
    number: int
    view: tuple[torch.Size, tuple[int, ...], int | torch.SymInt] | None = None
    """Size, stride and offset in that tensor, if it is a view."""

    def of(self, tensors: Tensors | dict[int, torch.Tensor]) -> torch.Tensor:
        """The saved view, of one of the tensors of its kind."""
        tensor = tensors[self.number]
        assert self.view is not None
        size, stride, offset = self.view
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


class Slice(NamedTuple):
    """Where a gradient is that shares memory with others, such as those of experts."""

    number: int
    """That of the result which has the memory of all of them, as a vector."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, results: Tensors | dict[int, torch.Tensor]) -> torch.Tensor:
        """The gradient."""
        return results[self.number].as_strided(self.size, self.stride, self.offset)

    def end(self) -> int:
        """Where the gradient ends in that memory."""
        steps = zip(self.size, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in steps)


class Saved(NamedTuple):
    """What a forward saves for backward."""

    inputs: tuple[int, ...] = ()
    """The numbers of saved inputs, in the order of saved tensors; those of saved outputs."""
    outputs: tuple[int, ...] = ()
    others: int = 0
    """The number of other tensors."""


class Noted:
    """What is known of the passes of one name: the facts, and what traces have shown."""

    def __init__(self, facts: Facts, recipe: Recipe | None, title: str) -> None:
        self.facts = facts
        self.recipe = recipe
        self.title = title
        """The pipeline, for messages."""
        self.wanted = [requires_grad for _, _, requires_grad in facts.tensors]
        """Whether each tensor requires a gradient."""
        self.wanted_places = [place for place, is_wanted in enumerate(self.wanted) if is_wanted]
        self.saved = Saved()
        """What the last forward saves, traced or not. Those of other layouts save other sets."""
        self.slices: list[Slice | None] = []
        """Of each wanted gradient, its place if it is a parameter's and shares memory with others;
        noted when the first one is traced."""
        self._traced: set[Saved] = set()
        texts = [text for text, _, _ in facts.tensors[1 : 1 + len(facts.summed)]]
        self.parameters = GraphParameters.of(texts)
        """How to make the parameters."""
        self.joined = self.parameters.joined
        """The numbers of the parameters that join several tensors."""
        self.has_quantized = any(text.startswith(QUANTIZED) for text in texts)
        """Whether a parameter is quantized."""

    @property
    def is_sliced(self) -> bool:
        """Whether gradients of parameters share memory with others."""
        return any(self.slices)

    def has_traced(self, saved: Saved) -> bool:
        """Whether a graph that was traced here saves this, or none was."""
        return not self._traced or saved in self._traced

    def note_saved(self, saved: Saved, *, is_fake: bool) -> None:
        """Note what a graph saves; check it of a forward that runs, whose graph was traced here."""
        self.saved = saved
        if is_fake:
            self._traced.add(saved)
        elif not self.has_traced(saved):
            raise StateError(
                f"A compiled {self.title} saved other tensors than when it was traced: {saved}, "
                f"and not {' or '.join(map(str, self._traced))}."
            )
