"""The time and the memory of one training step, from a layer's plan, a mesh, a GPU and its host."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fuser.errors import InputError
from fuser.plan.transformers import Transformer
from fuser.recipe import DelayedScaling
from fuser_forecast.hardware import (
    BESIDE,
    H200,
    Hardware,
    Ranks,
    Traffic,
    all_reduce,
    all_to_all,
    one_number,
    ring,
)
from fuser_forecast.host import MAPS, host_seconds, scales_seconds
from fuser_forecast.layer import (
    SIDES,
    VALUE,
    Layer,
    Product,
    Sent,
    bytes_of,
    derives_columnwise,
    gathered_bytes,
    plan_layer,
    reduces_amaxes,
    shards_are_whole_blocks,
    weight_bytes,
)
from fuser_forecast.mesh import Mesh
from fuser_forecast.result import Line, TrainingStep, Variant, added, line_of, repeated

# FlashAttention's backward has five products, one of them computed again; forward has two.
ATTENTION_BACKWARD = 2.5
# fp32 weights, gradients and the two averages of Adam, for each weight of a shard.
MASTER = 16
# Adam reads these four, and writes three.
OPTIMIZER = 28


@dataclass(frozen=True)
class _Wait:
    """A collective of one layer and microbatch that compute waits for; ``exposed`` in seconds."""

    name: str
    side: str
    traffic: Traffic
    exposed: float


def training_step(
    model: Transformer,
    mesh: Mesh,
    variant: Variant,
    *,
    tokens: int,
    microbatches: int = 1,
    recompute: bool = False,
    hardware: Hardware = H200,
) -> TrainingStep:
    """Model a step of ``microbatches`` with ``tokens`` rows on each GPU.

    With ``recompute`` every layer keeps its input alone, and backward computes its forward again.

    Raises
    ------
    InputError
        If the mesh does not divide the model, or a tensor parallel group has no whole sequences.
    """
    mesh.check(model)
    if tokens < 1 or microbatches < 1:
        raise InputError(f"A step has {microbatches} microbatches of {tokens} tokens; both are 1+.")
    if (tokens * mesh.tp) % model.sequence:
        raise InputError(
            f"{tokens} tokens on each of {mesh.tp} GPUs of a tensor parallel group are no whole "
            f"sequences of {model.sequence}."
        )
    layer = plan_layer(model, mesh.tp, mesh.ep, tokens, variant.recipe)
    return _Step(model, mesh, variant, layer, tokens, microbatches, recompute, hardware).result()


class _Step:
    """The formulas of one step. Seconds of a layer are those of one microbatch."""

    def __init__(
        self,
        model: Transformer,
        mesh: Mesh,
        variant: Variant,
        layer: Layer,
        tokens: int,
        microbatches: int,
        recompute: bool,
        hardware: Hardware,
    ) -> None:
        self.model, self.mesh, self.variant, self.layer = model, mesh, variant, layer
        self.tokens, self.microbatches, self.recompute = tokens, microbatches, recompute
        self.hardware = hardware
        self.recipe = variant.recipe
        self.travelling = variant.recipe if variant.quantized_traffic else None
        self.name = "bf16" if self.recipe is None else type(self.recipe).__name__

    def result(self) -> TrainingStep:
        lines = [*self._compute(), *self._wait_lines(), *self._shards(), *self._host()]
        return TrainingStep(
            self.mesh,
            self.variant,
            self.recompute,
            self.tokens,
            self.microbatches,
            tuple(line for line in lines if line.busy or line.nvlink or line.network),
            tuple(entry for entry in self._memory() if entry[1]),
            self.tokens * self.microbatches * self.model.flops_per_token,
            self._bytes_travel(),
            self.hardware,
        )

    # -- compute ------------------------------------------------------------------

    @functools.cached_property
    def _sides(self) -> dict[str, dict[str, float]]:
        """Seconds of the parts of one layer's compute: on each side, and of forward recomputed."""
        again = {"recomputed": self._side("forward", is_again=True)} if self.recompute else {}
        return {side: self._side(side) for side in SIDES} | again

    def _side(self, side: str, *, is_again: bool = False) -> dict[str, float]:
        hardware, layer = self.hardware, self.layer
        quantized = self._weights_quantized(side, is_again)
        products = sum(one.flops / self._rate(one) for one in layer.products) * (
            1 if side == "forward" else 2
        )
        scale = 1.0 if side == "forward" else ATTENTION_BACKWARD
        return {
            "products": products + self._dequantized(side) / hardware.memory_bandwidth,
            "attention": layer.attention * scale / hardware.attention,
            "elementwise": layer.elementwise[side] / hardware.memory_bandwidth,
            "quantization of weights": quantized / hardware.memory_bandwidth,
        }

    def _rate(self, product: Product) -> float:
        return self.hardware.products(self.name, is_grouped=product.is_expert)

    def _dequantized(self, side: str) -> float:
        """Bytes by which operands of emulated products are dequantized: read, and written."""
        if self.recipe is None or not self.hardware.is_emulated(self.name):
            return 0.0
        pairs = {
            "forward": ("input", "weight"),
            "backward": ("grad_output", "weight", "grad_output", "input"),
        }
        total = 0.0
        for product in self.layer.products:
            for role in pairs[side]:
                rows, columns = product.shape(role)
                total += bytes_of(self.recipe, role, (rows, columns), ("rowwise",))
                total += rows * columns * VALUE
        return total

    def _weights_quantized(self, side: str, is_again: bool) -> float:
        """Bytes by which weights are quantized: values are read, and both copies written.

        A weight that is gathered quantized is quantized once a forward, by shards; if its
        columnwise copy is a transpose, backward makes it. A weight whose values are gathered is
        quantized whole; again in backward if no copy was kept since forward, or if forward is
        computed again.
        """
        if self.recipe is None:
            return 0.0
        total = 0.0
        for product in self.layer.products:
            shape = product.shape("weight")
            one = weight_bytes(self.recipe, *shape, ("rowwise",))
            whole = product.weights * VALUE + 2 * one
            if is_again and self._quantizes_again(product):
                continue  # this backward gathers what its recomputed forward reads too
            if not self._travels_quantized(product):
                total += whole if side == "forward" or self._quantizes_again(product) else 0.0
            elif side == "forward":
                total += whole / self._ranks(experts=product.is_expert).size
            elif derives_columnwise(self.recipe):
                total += 2 * one
        return total

    def _travels_quantized(self, product: Product) -> bool:
        """Whether bytes and scales of this weight are gathered, not values."""
        ranks = self._ranks(experts=product.is_expert).size
        if self.travelling is None or ranks == 1:
            return False
        return shards_are_whole_blocks(self.travelling, *product.shape("weight"), ranks)

    def _bytes_travel(self) -> float:
        """The share of a layer's weights that are gathered as bytes and scales."""
        weights_and_travel = [
            (one.weights, self._travels_quantized(one)) for one in self.layer.products
        ]
        return sum(weights for weights, travels in weights_and_travel if travels) / sum(
            w for w, _ in weights_and_travel
        )

    def _quantizes_again(self, product: Product) -> bool:
        """Whether the quantized weight is freed after forward, though its values were gathered."""
        return self.travelling is not None and self._ranks(experts=product.is_expert).size > 1

    def _ranks(self, *, experts: bool) -> Ranks:
        """The ranks over which weights are sharded."""
        return self.mesh.expert_shards if experts else self.mesh.shards

    def _compute(self) -> list[Line]:
        times = self.model.layers * self.microbatches
        lines = []
        for side, parts in self._sides.items():
            for name, seconds in parts.items():
                total = seconds * times
                lines.append(Line(f"{name}, {side}", "compute", total, total))
        head = self._head_seconds() * self.microbatches
        local = self._local_weights() * OPTIMIZER / self.hardware.memory_bandwidth
        return [
            *lines,
            Line("head and loss", "compute", head, head),
            Line("optimizer", "compute", local, local),
        ]

    def _head_seconds(self) -> float:
        """The head's three products in bf16, and the loss, which reads logits and writes theirs."""
        logits = self.tokens * self.model.vocab
        products = 6 * logits * self.model.hidden / self.hardware.products("bf16", is_grouped=False)
        return products + 2 * VALUE * logits / self.hardware.memory_bandwidth

    # -- communication ------------------------------------------------------------

    def _wait_lines(self) -> list[Line]:
        """The lines of :meth:`_waits`; a recomputed forward communicates again."""
        lines: dict[str, Line] = {}
        for wait in self._waits:
            again = 2 if self.recompute and wait.side == "forward" else 1
            times = self.model.layers * self.microbatches * again
            busy = self.hardware.seconds(wait.traffic) * times
            line = line_of(wait.name, wait.traffic * times, busy, wait.exposed * times)
            lines[wait.name] = line if wait.name not in lines else added(lines[wait.name], line)
        return list(lines.values())

    @functools.cached_property
    def _waits(self) -> list[_Wait]:
        """The communication of tensor and of expert parallelism."""
        return [*self._tensor_parallel(), *self._experts()]

    def _tensor_parallel(self) -> Iterator[_Wait]:
        """Collectives of tensor parallel linears.

        Those of backward run beside products (docs/parallel.md), which they make longer by as much
        as they take alone: 0.98 of 1.03 ms on four H200, 0.88 of 0.92 on two.
        """
        ranks = self.mesh.tensor
        for sent in self.layer.sent:
            nbytes = sent.nbytes if self.variant.quantized_traffic else sent.value_bytes
            # A rank receives all but its own part of the whole tensor.
            traffic = ring(nbytes * ranks.size / (ranks.size - 1), ranks)
            if self.variant.quantized_traffic and self._agrees(sent):
                traffic += one_number(ranks)
            name = f"TP {sent.collective.kind} {sent.collective.tensor}, {sent.side}"
            yield _Wait(name, sent.side, traffic, self.hardware.seconds(traffic))

    def _agrees(self, sent: Sent) -> bool:
        """Whether ranks reduce an amax before they quantize the rows that they send.

        Backward sends the input's rows as forward has quantized them; under delayed scaling the
        scale is known.
        """
        quantization = sent.collective.quantization
        is_new = (sent.side, sent.collective.tensor) != ("backward", "input")
        is_known = isinstance(self.recipe, DelayedScaling)
        return (
            quantization is not None
            and quantization.format.has_one_scale
            and is_new
            and not is_known
        )

    def _experts(self) -> Iterator[_Wait]:
        """Tokens to the ranks of their experts and back: nothing runs during it.

        A row is sent for each expert of a token. With quantized traffic rows and the gradients of
        the experts' outputs are sent as one copy; tensors that are added up are sent as values.
        Before the first exchange the host reads counts of rows.
        """
        if self.mesh.ep == 1:
            return
        maps = MAPS * self.hardware.host
        yield _Wait("EP counts and maps, forward", "forward", Traffic(latency=maps), maps)
        shape = (self.tokens * self.model.top_k, self.model.hidden)
        for side, tensor, role in (
            ("forward", "dispatch", "input"),
            ("forward", "combine", ""),
            ("backward", "combine", "grad_output"),
            ("backward", "dispatch", ""),
        ):
            nbytes = shape[0] * shape[1] * VALUE
            if role and self.travelling is not None:
                nbytes = bytes_of(self.travelling, role, shape, ("rowwise",))
            traffic = all_to_all(nbytes, self.mesh.experts)
            yield _Wait(f"EP {tensor}, {side}", side, traffic, self.hardware.seconds(traffic))

    def _gather(self, side: str) -> Traffic:
        """The weights of one layer: those of each kind of shards are one collective.

        Before forward gathers weights that have a scale or amax of the whole tensor, the ranks
        reduce those of all of them.
        """
        total = Traffic()
        quantizes = side == "forward" and not isinstance(self.recipe, DelayedScaling)
        for experts in (False, True):
            ranks = self._ranks(experts=experts)
            if of_kind := self.layer.weights_of(experts=experts):
                whole = sum(
                    gathered_bytes(self.travelling, one, self._copies(side), ranks.size)
                    for one in of_kind
                )
                total += ring(whole, ranks)
                total += self._reduction(experts=experts) if quantizes else Traffic()
        return total

    def _reduction(self, *, experts: bool) -> Traffic:
        """That of the amaxes of weights of one kind when they are quantized; empty without one."""
        of_kind = self.layer.weights_of(experts=experts)
        if self.recipe is None or not reduces_amaxes(self.recipe):
            return Traffic()
        if not any(self._travels_quantized(one) for one in of_kind):
            return Traffic()
        return one_number(self._ranks(experts=experts))

    def _copies(self, side: str) -> tuple[str, ...]:
        """The copies of weights that ``side`` reads."""
        copies = {"forward": ("rowwise",), "backward": ("columnwise",)}
        return (
            copies["forward"] + copies[side]
            if self.recompute and side == "backward"
            else copies[side]
        )

    def _reduce(self) -> Traffic:
        """The gradients of one layer to their shards, as bf16 values."""
        total = Traffic()
        for experts in (False, True):
            if of_kind := self.layer.weights_of(experts=experts):
                values = sum(one.weights for one in of_kind) * VALUE
                total += ring(values, self._ranks(experts=experts))
        return total

    def _replicate(self) -> Traffic:
        """The shards' gradients of one layer, added over replicas, as bf16 values."""
        return all_reduce(self._layer_shards() * VALUE, self.mesh.copies)

    def _layer_shards(self) -> float:
        """The weights of one layer of which a GPU has the shards."""
        return sum(
            one.weights / self._ranks(experts=one.is_expert).size for one in self.layer.products
        )

    def _shards(self) -> list[Line]:
        """FSDP: a layer's weights arrive during the layer before, gradients leave during the next.

        So the first gather and the last reduction of a microbatch are exposed, and between them the
        time beyond a layer's compute; the rest is exposed by a share (:data:`BESIDE`). Replicas add
        their gradients once a step. Embedding and head are one more collective, during the head.
        """
        layers, seconds = self.model.layers, self.hardware.seconds
        lines = [repeated(line, self.microbatches) for line in self._of_shards]
        if self.mesh.replicas > 1:
            parts = self._backward_parts
            extra = ("all-reduce over replicas", self._replicate())
            without = sum(line.exposed for line in self._backward_lines(parts))
            backward_lines = self._backward_lines([*parts, extra])
            exposed = sum(line.exposed for line in backward_lines) - without
            total = extra[1] * layers
            lines.append(line_of(extra[0], total, seconds(extra[1]) * layers, exposed))
        if isinstance(self.recipe, DelayedScaling):  # an optimizer of lists writes all at once
            number = sum(seconds(self._reduction(experts=experts)) for experts in (False, True))
            kind = "network" if self.mesh.shards.nodes > 1 else "NVLink"
            lines.append(Line("amaxes of weights", kind, number, number))
        if self.model.vocab:
            traffic = ring(self._ends() * VALUE, self.mesh.shards) * 2
            exposed = _beside(seconds(traffic), _beyond(seconds(traffic), self._head_seconds()))
            line = line_of("embedding and head", traffic, seconds(traffic), exposed)
            lines.append(repeated(line, self.microbatches))
        return lines

    @functools.cached_property
    def _backward_parts(self) -> list[tuple[str, Traffic]]:
        """The collectives of one layer's backward."""
        return [
            ("FSDP all-gather, backward", self._gather("backward")),
            ("FSDP reduce-scatter", self._reduce()),
        ]

    @functools.cached_property
    def _of_shards(self) -> list[Line]:
        """The collectives of weights and of their gradients in one microbatch."""
        layers, seconds = self.model.layers, self.hardware.seconds
        gather = self._gather("forward")
        one = seconds(gather)
        alone = one + (layers - 1) * _beyond(one, self._covering("forward"))
        exposed = _beside(one * layers, alone)
        forward = line_of("FSDP all-gather, forward", gather * layers, one * layers, exposed)
        return [forward, *self._backward_lines(self._backward_parts)]

    def _backward_lines(self, parts: Sequence[tuple[str, Traffic]]) -> list[Line]:
        """The collectives of backward; the exposed time is divided among them by their times."""
        layers, seconds = self.model.layers, self.hardware.seconds
        one = sum(seconds(traffic) for _, traffic in parts)
        last = sum(seconds(traffic) for _, traffic in parts[1:])
        alone = last + (layers - 1) * _beyond(one, self._covering("backward"))
        exposed = _beside(one * layers, alone)
        return [
            line_of(name, part * layers, seconds(part) * layers, exposed * seconds(part) / one)
            for name, part in parts
            if one
        ]

    def _covering(self, side: str) -> float:
        """Seconds of one layer's ``side`` and its waiting, during which FSDP communicates."""
        total = sum(self._sides[side].values())
        sides: tuple[str, ...] = (side,)
        if side == "backward" and self.recompute:
            total += sum(self._sides["recomputed"].values())
            sides = SIDES
        return total + sum(wait.exposed for wait in self._waits if wait.side in sides)

    # -- host ---------------------------------------------------------------------

    def _host(self) -> Iterator[Line]:
        """The host on each side, exposed by the time by which it is slower than the GPU.

        A half of a layer's time is taken for each side.
        """
        products = self.layer.products
        layer = host_seconds(
            self.model,
            self.mesh,
            self.recipe,
            is_sharded=any(self._ranks(experts=one.is_expert).size > 1 for one in products),
            gathered=sum(self._travels_quantized(one) for one in products),
        )
        half = (self.model.layers * layer + scales_seconds(self.recipe)) / 2 * self.hardware.host
        shards = self._of_shards
        for side, lines in zip(SIDES, (shards[:1], shards[1:]), strict=True):
            forwards = 2 if self.recompute and side == "backward" else 1
            gpu = self.model.layers * self._covering(side) + sum(one.exposed for one in lines)
            line = Line(f"host, {side}", "host", half * forwards, _beyond(half * forwards, gpu))
            yield repeated(line, self.microbatches)

    # -- memory -------------------------------------------------------------------

    def _local_weights(self) -> float:
        """All weights of which a GPU has the shards."""
        ends = self._ends() / self.mesh.shards.size
        return self.model.layers * self._layer_shards() + ends

    def _ends(self) -> float:
        """The weights of embedding and head of a tensor parallel rank."""
        return 2 * self.model.vocab * self.model.hidden / self.mesh.tp

    def _memory(self) -> list[tuple[str, float]]:
        layers, layer = self.model.layers, self.layer
        kept_layers = 1 if self.recompute else layers
        weights = sum(one.weights for one in layer.products)
        shards = kept = transposed = 0.0
        for one in layer.products if self.recipe is not None else ():
            assert self.recipe is not None
            copy = weight_bytes(self.recipe, *one.shape("weight"), ("columnwise",))
            if self._travels_quantized(one):
                shards += 2 * copy / self._ranks(experts=one.is_expert).size
                transposed += copy if derives_columnwise(self.recipe) else 0
            elif self._quantizes_again(one):
                transposed += 2 * copy  # of the gathered values
            else:
                kept += copy  # an op saves the weight that it quantized
        is_sharded = max(self.mesh.shards.size, self.mesh.expert_shards.size) > 1
        at_once = min(2, layers) if is_sharded else 0
        gathered = transposed + max(self._whole(side) for side in SIDES)
        activations = layer.saved * kept_layers + layer.input * layers * self.recompute
        return [
            ("fp32 weights, gradients, Adam", self._local_weights() * MASTER),
            ("quantized shards", shards * layers),
            ("bf16 weights", 0 if is_sharded else weights * VALUE * layers),
            ("gathered weights, two layers", gathered * at_once),
            ("gathered embedding and head", self._ends() * VALUE * is_sharded),
            ("gradients before reduction", weights * VALUE * at_once),
            ("quantized weights for backward", kept * kept_layers),
            ("activations", activations),
            ("logits and their gradient", 2 * VALUE * self.tokens * self.model.vocab),
        ]

    def _whole(self, side: str) -> int:
        """Bytes of one layer's gathered weights on ``side``."""
        return sum(
            gathered_bytes(
                self.travelling, one, self._copies(side), self._ranks(experts=one.is_expert).size
            )
            for one in self.layer.products
        )


def _beyond(seconds: float, covered: float) -> float:
    return max(0.0, seconds - covered)


def _beside(seconds: float, alone: float) -> float:
    """The exposed time of collectives of which ``alone`` is not beside compute."""
    return alone + BESIDE * (seconds - alone)
