"""Costs: the modelled time of a window, from its bytes, its kernel launches and its products.

A cover is chosen by bytes and launches alone: its products are those of every other cover. A step
also has the time of its products: of their operations, or of the tensors that they move if that
takes longer. What else the step moves, such as for quantizing, takes its time after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fuser.op import FusedOperation
from fuser.plan.cover import Candidate
from fuser.plan.devices import Device, precision_of
from fuser.plan.graph import OpGraph
from fuser.plan.plan import Step
from fuser.recipe import Float8CurrentScaling
from fuser.report.text import format_bytes
from fuser.specs import OpKey, Product, QuantSpec

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
        flops, products, converting, beside = self._products(window, side, traffic)
        seconds = cost + products + converting + (beside - traffic) / self.device.bandwidth
        if isinstance(self.graph.key.recipe, Float8CurrentScaling):
            seconds += self._amaxes(window, side, fuses_quantize) / self.device.bandwidth
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

    def _products(
        self, window: range, side: str, traffic: float
    ) -> tuple[float, float, float, float]:
        """The products of a window: their operations and seconds, and what is beside them.

        That is the seconds in which operands get another format, as far as ``traffic`` lacks them,
        and the bytes of other ops. Between two products of a window these are a kernel, though the
        window's ``traffic`` has only what enters and leaves.
        """
        graph, flops, seconds, converting, moved = self.graph, 0.0, 0.0, 0.0, 0.0
        scale = self.tokens / graph.tokens
        rest: list[int] = []
        for i in window:
            product = graph.ops[i].product(*graph.main_specs[i : i + 2])
            if product is None or (side == "backward" and i < self.first):
                rest.append(i)
                continue
            key = graph.key.window(i, i + 1)
            (op,) = key.ops
            weights = op.params[: graph.ops[i].main_grad_count]  # biases and adapters have others
            weight_needs_grad = any(param.requires_grad for param in weights)
            is_run = [True] if side == "forward" else [op.input_requires_grad, weight_needs_grad]
            dtype = key.autocast_dtype or graph.main_specs[i + 1].dtype
            kernels = " ".join(graph.ops[i].kernels(side, key))
            is_native = key.recipe is not None and "(native)" in kernels
            precision = type(key.recipe).__name__ if is_native else precision_of(dtype)
            rate = self.device.products(precision, is_grouped=product.groups > 0).on(side)
            of_tokens, of_params = graph.window_bytes(i, i + 1, side)
            nbytes = of_tokens * scale + of_params
            done = product.flops * scale * sum(is_run)
            flops += done
            moved += nbytes
            takes = max(done / rate, nbytes / self.device.bandwidth)
            if key.recipe is not None:  # the product does not read what is quantized before it
                width = QUANTIZED if is_native else dtype.itemsize
                read = self._moved(product, side, is_run, width, dtype.itemsize)
                alone = min(takes, max(done / rate, read / self.device.bandwidth))
                converting += takes - alone
                takes = alone
            seconds += takes
            if key.recipe is not None and "(emulated)" in kernels:
                converting += self._dequantizing(product, side, is_run, dtype.itemsize)
            if key.recipe is not None and product.groups and "quantize" in kernels:
                converting += self._quantizing_groups(product, side, dtype.itemsize, op)
        beside = max(traffic - moved, 0.0)
        if len(window) - len(rest) > 1:
            of_rest = [graph.window_bytes(i, i + 1, side) for i in rest]
            beside = sum(of_tokens * scale + of_params for of_tokens, of_params in of_rest)
        return flops, seconds, converting, beside

    def _amaxes(self, window: range, side: str, fuses_quantize: bool) -> float:
        """Bytes that are read once more for an amax, before values are quantized with its scale."""
        graph, moved = self.graph, 0.0
        for i in window:
            for role in graph.ops[i].quantizes(side, graph.key.window(i, i + 1)):
                if role == "weight":
                    moved += graph.params[i][0].numel() * graph.main_specs[i + 1].dtype.itemsize
                else:
                    moved += self._values(i if role == "input" else i + 1)
        if fuses_quantize and side == "forward" and graph.quant_spec(window.stop, side):
            moved += self._values(window.stop - 1)
        elif fuses_quantize and side == "backward" and graph.quant_spec(window.start, side):
            moved += self._values(window.start) + self._values(window.start + 1)
        return moved

    def _values(self, gap: int) -> float:
        """Bytes of the unquantized tensor before op ``gap`` for the tokens of the model."""
        return self.graph.main_specs[gap].nbytes * self.tokens / self.graph.tokens

    def _dequantizing(
        self, product: Product, side: str, is_run: Sequence[bool], itemsize: int
    ) -> float:
        """Seconds in which operands of emulated products are read quantized, and written."""
        elements = self._moved(product, side, is_run, 1, 0)
        return elements * (QUANTIZED + itemsize) / self.device.bandwidth

    def _moved(
        self, product: Product, side: str, is_run: Sequence[bool], width: int, of_results: int
    ) -> float:
        """Bytes of operands, ``width`` an element, and of results of the products that run."""
        inputs, weights, outputs = self._operands(product)
        sizes = [(inputs + weights, outputs)]
        if side == "backward":
            sizes = [(outputs + weights, inputs), (outputs + inputs, weights)]
        return sum(
            width * read + of_results * written
            for (read, written), runs in zip(sizes, is_run, strict=True)
            if runs
        )

    def _quantizing_groups(self, product: Product, side: str, itemsize: int, op: OpKey) -> float:
        """Seconds in which a grouped linear quantizes its operands, which no graph counts.

        Values are read, once more for an amax, and both copies written. Of weights whose copy is
        not kept, forward writes one, and backward the other, without another amax.
        """
        inputs, weights, outputs = self._operands(product)
        elements = inputs + weights if side == "forward" else outputs
        reads = 2 if isinstance(self.graph.key.recipe, Float8CurrentScaling) else 1
        moved = elements * (reads * itemsize + 2 * QUANTIZED)
        if not op.keeps_weight:
            moved += weights * (-QUANTIZED if side == "forward" else itemsize + QUANTIZED)
        return moved / self.device.bandwidth

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
            parts = (collective.quantization, collective.tensor)
            tensor = " ".join(str(part) for part in parts if part)
            a_token = format_bytes(nbytes / self.graph.tokens)
            name = f"{collective.kind} {tensor} ({collective.ranks} ranks: {a_token}/token)"
            collectives.append((name, nbytes, collective.is_first))
        return collectives
