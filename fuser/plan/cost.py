"""Costs: the modelled time of a window, from its bytes and its kernel launches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fuser.op import FusedOperation
from fuser.plan.cover import Candidate
from fuser.plan.graph import OpGraph
from fuser.plan.plan import Step
from fuser.report.text import format_bytes
from fuser.specs import PlanKey, QuantSpec

# Shapes are not part of a plan's key, so all plans use one token count. It is
# large enough that memory traffic dominates launches, as in training.
NOMINAL_TOKENS = 8192


# Kernels of ops that only communicate; a plan shows them with their bytes.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


# FLOP/s of products on an H200 in forward and backward, by recipe: the six products of
# RMSNorm-Linear-SwiGLU-Linear-add at T 8192, H 4096, F 14336
# (benchmarks/results/pipelines_h200_gemms_alone.csv, "GEMMs alone"). fp32 without TF32 was not
# measured: the share of its nominal 67 TFLOP/s that bf16 has of its nominal 989.
H200_PRODUCTS = {
    "bf16": 672.8e12,
    "DelayedScaling": 1311.3e12,
    "Float8CurrentScaling": 1311.1e12,
    "Float8BlockScaling": 992.7e12,
}
H200_FP32_PRODUCTS = 67e12 * 672.8 / 989


@dataclass(frozen=True)
class DeviceCosts:
    """The cost model of a device.

    Bytes per second to memory, seconds per launch, bytes per second to another rank, and FLOP/s of
    products in 16 bits and in fp32, and of native quantized ones by recipe.
    """

    bandwidth: float
    launch: float
    link: float
    products: float
    fp32_products: float
    quantized_products: Mapping[str, float] = field(default_factory=dict)

    def product_rate(self, key: PlanKey, side: str, names: Iterable[str]) -> float:
        """FLOP/s of the products of an op on ``side``; ``key`` is narrowed to it.

        ``names`` are those of its kernels. Operands of an emulated product are multiplied in the
        compute dtype. A native one of a recipe that was not measured counts as one with a scale a
        tensor.
        """
        recipe = key.recipe
        is_quantized = recipe is not None and (side == "forward" or recipe.quantizes_backward)
        if is_quantized and self.quantized_products and not any("emulated" in n for n in names):
            rates = self.quantized_products
            return rates.get(type(recipe).__name__, rates["Float8CurrentScaling"])
        dtype = key.autocast_dtype or key.ops[0].params[0].dtype
        return self.fp32_products if dtype is torch.float32 else self.products


# An H200 copies 4.2 TB/s and a launch costs about 5 us of host time (measured,
# docs/facts.md). The CPU's numbers are estimates for two cores.
# Links are nominal: NVLink of an H200 in one direction, and gloo between two processes of a host.
DEVICE_COSTS = {
    "cuda": DeviceCosts(
        4.2e12, 5e-6, 4.5e11, H200_PRODUCTS["bf16"], H200_FP32_PRODUCTS, H200_PRODUCTS
    ),
    "cpu": DeviceCosts(2e10, 2e-6, 1e9, 1e11, 1e11),
}


class CostModel:
    """Modelled time of windows of ``graph`` on a kind of device.

    ``first`` is the first op that needs a gradient; backward ends there.
    """

    def __init__(self, graph: OpGraph, device: str, first: int) -> None:
        self.graph = graph
        self.first = first
        self.device = DEVICE_COSTS.get(device, DEVICE_COSTS["cuda"])

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
        traffic = a_token * NOMINAL_TOKENS + param_bytes
        cost = traffic / self.device.bandwidth + len(names) * self.device.launch
        cost += link * NOMINAL_TOKENS / self.device.link
        fusion = None if run is None else (run if isinstance(run, type) else type(run)).__name__
        step = Step(
            ops=tuple(window),
            fusion=fusion,
            kernel=", ".join(names),
            bytes_per_token=a_token + param_bytes / NOMINAL_TOKENS,
            microseconds=cost * 1e6,
            emits=self.graph.quant_spec(window.stop if side == "forward" else window.start, side),
            link_bytes_per_token=link,
        )
        return Candidate(window.start, window.stop, cost, run, step)

    def arithmetic(self, side: str) -> float:
        """Seconds by which the products of ``side`` take longer than the bytes that they move.

        Those of a plan's steps are the bytes alone, since covers have the same products.
        """
        graph, seconds = self.graph, 0.0
        for i, op in enumerate(graph.ops):
            key = graph.key.window(i, i + 1)
            (op_key,) = key.ops
            weights = op_key.params[: op.main_grad_count]
            wants = (op_key.input_requires_grad, any(weight.requires_grad for weight in weights))
            features, count = op.product_features(), sum(wants) if side == "backward" else 1
            if not (features and count):
                continue
            rows = max(math.prod(graph.main_specs[gap].shape[:-1]) for gap in (i, i + 1))
            flops = 2 * rows * math.prod(features) / graph.tokens * NOMINAL_TOKENS
            rate = self.device.product_rate(key, side, op.kernels(side, key))
            of_tokens, of_params = graph.window_bytes(i, i + 1, side)
            moved = of_tokens / graph.tokens * NOMINAL_TOKENS + of_params
            seconds += max(0.0, count * flops / rate - moved / self.device.bandwidth)
        return seconds

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
