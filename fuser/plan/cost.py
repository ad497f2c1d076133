"""Costs: the modelled time of a window, from its bytes, its kernel launches and its products.

A cover is chosen by bytes and launches alone: its products are those of every other cover. A step
also has the time of its products: of their operations, or of the tensors that they move if that
takes longer. What else the step moves takes its time after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fuser.op import FusedOperation
from fuser.plan.cover import Candidate
from fuser.plan.devices import Device, precision_of
from fuser.plan.graph import OpGraph
from fuser.plan.plan import Step
from fuser.report.text import format_bytes
from fuser.specs import Product, QuantSpec

# Shapes are not part of a plan's key, so all plans use one token count. It is
# large enough that memory traffic dominates launches, as in training.
NOMINAL_TOKENS = 8192


QUANTIZED = 1  # bytes of a quantized element, nearly

# Kernels of ops that only communicate; a plan shows them with their bytes.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


class CostModel:
    """Modelled time of windows of ``graph`` on ``device``, for ``tokens`` rows.

    ``first`` is the first op that needs a gradient; backward ends there.
    """

    def __init__(self, graph: OpGraph, device: Device, first: int, tokens: int) -> None:
        self.graph = graph
        self.first = first
        self.device = device
        self.tokens = tokens

    def candidate(
        self,
        window: range,
        side: str,
        run: type[FusedOperation] | FusedOperation | None,
        kernels: Sequence[tuple[str, int]],
        fuses_quantize: bool = False,
        sends: Mapping[str, QuantSpec] | None = None,
    ) -> Candidate:
        """The candidate that runs ``window`` on ``side``, with its cost and its step.

        ``kernels`` are names, each with the number of ops that it finishes. If the window's output
        is quantized and ``fuses_quantize`` is false, the cost includes a kernel that quantizes it.
        ``sends``: what travels quantized, as ``FusedOperation.sends`` returns it.
        """
        token_bytes = param_bytes = 0
        done = 0
        recomputes = run is not None and run.recomputes
        for _, covered in kernels:
            if covered == 0:
                continue
            low, high = window.start + done, window.start + done + covered
            if side == "backward":
                low, high = window.stop - done - covered, window.stop - done
            for_tokens, for_params = self.graph.window_bytes(low, high, side, recomputes=recomputes)
            token_bytes += for_tokens
            param_bytes += for_params
            done += covered
        names = [name for name, _ in kernels]
        if side == "forward" or window.stop > self.first:
            before = self.graph.quantize_kernels(window.start, window.stop, side)
            names = [*(name for name, _, _ in before), *names]
            token_bytes += sum(for_tokens for _, for_tokens, _ in before)
            param_bytes += sum(for_params for _, _, for_params in before)
            after = self.graph.output_quantize_bytes(window.start, window.stop, side)
            if after is not None and not fuses_quantize:
                names.append("quantize")
                token_bytes += after
        sent = self._collectives(window, side, sends or {})
        names = [
            *(name for name, _, is_first in sent if is_first),
            *(name for name in names if name not in COLLECTIVES),
            *(name for name, _, is_first in sent if not is_first),
        ]
        link = sum(nbytes for _, nbytes, _ in sent) / self.graph.tokens
        a_token = token_bytes / self.graph.tokens
        traffic = a_token * self.tokens + param_bytes
        cost = traffic / self.device.bandwidth + len(names) * self.device.launch
        cost += link * self.tokens / self.device.link
        flops, products, own = self._products(window, side)
        seconds = cost + products - min(own, traffic) / self.device.bandwidth
        fusion = None if run is None else (run if isinstance(run, type) else type(run)).__name__
        step = Step(
            ops=tuple(window),
            fusion=fusion,
            kernel=", ".join(names),
            bytes_per_token=a_token + param_bytes / self.tokens,
            microseconds=seconds * 1e6,
            flops_per_token=flops / self.tokens,
            product_microseconds=products * 1e6,
            cover_microseconds=cost * 1e6,
            emits=self.graph.quant_spec(window.stop if side == "forward" else window.start, side),
            link_bytes_per_token=link,
        )
        return Candidate(window.start, window.stop, cost, run, step)

    def _products(self, window: range, side: str) -> tuple[float, float, float]:
        """The products of a window: operations, seconds, and the bytes that they move."""
        graph, flops, seconds, moved = self.graph, 0.0, 0.0, 0.0
        scale = self.tokens / graph.tokens
        for i in window:
            product = graph.ops[i].product(*graph.main_specs[i : i + 2])
            if product is None or (side == "backward" and i < self.first):
                continue
            key = graph.key.window(i, i + 1)
            (op,) = key.ops
            weight_needs_grad = any(param.requires_grad for param in op.params)
            is_run = [True] if side == "forward" else [op.input_requires_grad, weight_needs_grad]
            dtype = key.autocast_dtype or graph.main_specs[i + 1].dtype
            kernels = " ".join(graph.ops[i].kernels(side, key))
            is_native = key.recipe is not None and "(native)" in kernels
            precision = type(key.recipe).__name__ if is_native else precision_of(dtype)
            rate = self.device.products(precision, is_grouped=product.groups > 0).on(side)
            of_tokens, of_params = graph.window_bytes(i, i + 1, side)
            own = of_tokens * scale + of_params
            done = product.flops * scale * sum(is_run)
            flops += done
            moved += own
            seconds += max(done / rate, own / self.device.bandwidth)
            if key.recipe is not None and "(emulated)" in kernels:
                seconds += self._dequantizing(product, side, is_run, dtype.itemsize)
            if key.recipe is not None and product.groups and "quantize" in kernels:
                seconds += self._quantizing_groups(product, side, dtype.itemsize)
        return flops, seconds, moved

    def _dequantizing(
        self, product: Product, side: str, is_run: Sequence[bool], itemsize: int
    ) -> float:
        """Seconds in which operands of emulated products are read quantized, and written."""
        inputs, weights, outputs = self._operands(product)
        pairs = [inputs + weights] if side == "forward" else [outputs + weights, outputs + inputs]
        elements = sum(pair for pair, runs in zip(pairs, is_run, strict=True) if runs)
        return elements * (QUANTIZED + itemsize) / self.device.bandwidth

    def _quantizing_groups(self, product: Product, side: str, itemsize: int) -> float:
        """Seconds in which a grouped linear quantizes its operands, which no graph counts.

        Values are read, and both copies written.
        """
        inputs, weights, outputs = self._operands(product)
        elements = inputs + weights if side == "forward" else outputs
        return elements * (itemsize + 2 * QUANTIZED) / self.device.bandwidth

    def _operands(self, product: Product) -> tuple[float, float, float]:
        """Elements of input, weight and output for the tokens of the model."""
        scale = self.tokens / self.graph.tokens
        inputs, weights, outputs = product.operands
        return inputs * scale, float(weights), outputs * scale

    def _collectives(
        self, window: range, side: str, sends: Mapping[str, QuantSpec]
    ) -> list[tuple[str, int, bool]]:
        """The communication of a window: its name with its bytes, these, and whether it is first.

        Inputs of products are sent before the products, their results after them.
        """
        if side == "backward" and window.stop <= self.first:
            return []
        collectives = []
        for collective, nbytes in self.graph.collectives(window.start, window.stop, side, sends):
            tensor = " ".join(
                str(part) for part in (collective.quantization, collective.tensor) if part
            )
            a_token = format_bytes(nbytes / self.graph.tokens)
            name = f"{collective.kind} {tensor} ({collective.ranks} ranks: {a_token}/token)"
            collectives.append((name, nbytes, collective.is_first))
        return collectives
