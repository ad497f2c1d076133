"""FusedAdam, FusedSGD and functions over lists of tensors, on torch's fused optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fuser.cuda.launch import kernels_support
from fuser.cuda.repeated import Cache, repeated_launches
from fuser.errors import InputError
from fuser.functional.adamw import AdamWStep
from fuser.functional.adamw import adamw as adamw_step
from fuser.functional.lazy import as_stored, materialize
from fuser.reference.adamw import constants_of
from fuser.tensors import QuantizedTensor
from fuser.tensors.writes import write_updated

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
]

Loss = Any
"""What a closure returns."""


def _quantized(parameter: torch.Tensor) -> QuantizedTensor | None:
    """The quantized tensor that a parameter is, or that a DTensor has on this rank."""
    local = getattr(parameter, "_local_tensor", parameter)
    return local if isinstance(local, QuantizedTensor) else None


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether a step changes the values of the parameter itself, as torch's kernels take them."""
    if _quantized(parameter) is not None:
        return False
    return parameter.dtype is torch.float32 and parameter.is_contiguous()


class _Fused(torch.optim.Optimizer):
    """What both optimizers share: parameters are updated in fp32, and written once.

    A parameter in 16 bits or quantized is updated as its master weight in fp32, the state's
    ``master_param`` if there are ``master_weights``, else as its present values.
    """

    master_weights: bool
    use_decoupled_grad = False

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        gradient: torch.Tensor | None = getattr(parameter, name, None)
        if gradient is not None and gradient.is_sparse:
            raise InputError(
                f"{type(self).__name__} got a sparse gradient of shape {tuple(gradient.shape)}; it "
                "takes dense ones. Use torch.optim.SparseAdam for that parameter."
            )
        return gradient

    def _values(self, parameter: torch.Tensor) -> torch.Tensor:
        """The values in fp32 that a step changes, contiguous; of an fp32 parameter itself."""
        if _is_plain(parameter):
            return parameter.detach()
        master: torch.Tensor | None = self.state[parameter].get("master_param")
        if master is None:
            quantized = _quantized(parameter)
            if quantized is None:
                master = parameter.detach().to(torch.float32, copy=True).contiguous()
            else:
                master = self._values_of(parameter, quantized)
            if self.master_weights and (
                parameter.dtype is not torch.float32 or quantized is not None
            ):
                self.state[parameter]["master_param"] = master
        return master

    def _values_of(self, parameter: torch.Tensor, quantized: QuantizedTensor) -> torch.Tensor:
        """The values of a quantized parameter, those before it was quantized if they are kept."""
        first = quantized.get_high_precision_init_val() if self.master_weights else None
        if first is None:
            values = quantized._values(torch.float32).contiguous()
        else:
            values = first.to(quantized.device, torch.float32, copy=True).contiguous()
            quantized.clear_high_precision_init_val()
        if quantized is parameter:
            return values
        sharded: Any = parameter.detach()
        whole: torch.Tensor = type(sharded).from_local(
            values,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )
        return whole

    def _trained(self, group: dict[str, Any]) -> list[torch.Tensor]:
        """The parameters of a group that have gradients, after a check that all can be updated."""
        trained = [p for p in group["params"] if self._gradient(p) is not None]
        for parameter in trained:
            if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise InputError(
                    f"{type(self).__name__} got a parameter of {parameter.dtype}; it computes in "
                    "fp32. Use torch.optim for that parameter."
                )
            if isinstance(parameter, QuantizedTensor):
                parameter._can_be_written_alone()  # refuses if it is read-only
        return trained

    @staticmethod
    def _write(parameter: torch.Tensor, values: torch.Tensor) -> None:
        if _is_plain(parameter):  # torch's fused kernels raise no version
            torch.autograd.graph.increment_version(parameter)
        else:
            parameter.detach().copy_(values)

    def _gradients(
        self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The gradients in the dtype and layout of the values."""
        gradients = []
        for parameter, value in zip(parameters, values, strict=True):
            gradient = self._gradient(parameter)
            assert gradient is not None
            gradients.append(gradient.to(value.dtype).contiguous())
        return gradients

    def __getstate__(self) -> dict[str, Any]:
        own = ("adam_w_mode", "capturable", "master_weights", "use_decoupled_grad")
        kept = {name: self.__dict__[name] for name in own if name in self.__dict__}
        return {**super().__getstate__(), **kept}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or to zeros; decoupled ones too."""
        super().zero_grad(set_to_none)
        if self.use_decoupled_grad:
            for group in self.param_groups:
                for parameter in group["params"]:
                    gradient: torch.Tensor | None = getattr(parameter, "decoupled_grad", None)
                    if set_to_none or gradient is None:
                        parameter.decoupled_grad = None
                    else:
                        gradient.detach().zero_()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; moments and master weights are in fp32, also of parameters in 16 bits.

        Raises
        ------
        InputError
            For a state whose parameters have taken different numbers of steps, or of an optimizer
            that maximizes or has ``amsgrad``; nothing is loaded then.
        """
        for group in state_dict["param_groups"]:
            for name in ("maximize", "amsgrad"):
                if group.get(name):
                    raise InputError(
                        f"{type(self).__name__} got a state with {name}=True, which is not here. "
                        "Load it into torch.optim."
                    )
        counts = [self._step_of(state_dict, group) for group in state_dict["param_groups"]]
        super().load_state_dict(state_dict)
        for group, count in zip(self.param_groups, counts, strict=True):
            if count is not None:
                group["step"] = count
            for parameter in group["params"]:
                self.state.get(parameter, {}).pop("step", None)
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name != "step" and isinstance(value, torch.Tensor) and value.is_floating_point():
                    # torch has cast it to the dtype of the parameter.
                    own = value.to(parameter.device, torch.float32, copy=True).contiguous()
                    self.state[parameter][name] = own

    def _step_of(self, state_dict: dict[str, Any], group: dict[str, Any]) -> float | None:
        """The step that a state of ``torch.optim`` has for each parameter of a group, if it has."""
        states = [state_dict["state"].get(number, {}) for number in group["params"]]
        counts = {float(state["step"]) for state in states if "step" in state}
        if len(counts) > 1:
            raise InputError(
                f"{type(self).__name__} got a state whose parameters have the steps "
                f"{sorted(counts)}; a group has one. Load it into torch.optim."
            )
        return counts.pop() if counts else None


def _step_once(target: torch.Tensor, step: AdamWStep) -> None:
    """Update a master weight and write the parameter, in one pass where kernels run."""
    if isinstance(target, QuantizedTensor):
        write_updated(target, adamw_step(step, target.dtype))
    elif target.is_contiguous():
        materialize(adamw_step(step, target.dtype, values=target))
        _note_write(target)
    else:
        target.copy_(materialize(adamw_step(step, target.dtype)))


def _note_write(parameter: torch.Tensor) -> None:
    """After a kernel has written a parameter."""
    if isinstance(parameter, QuantizedTensor):
        parameter._was_written()
    else:
        torch.autograd.graph.increment_version(parameter)


def _step_together(steps: Sequence[tuple[torch.Tensor, AdamWStep]], known: Cache) -> None:
    """Take the steps of parameters on one device: launches that are recorded and repeated."""
    written = [p if isinstance(p, QuantizedTensor) else p.detach() for p, _ in steps]

    def step_each() -> None:
        for target, (_, step) in zip(written, steps, strict=True):
            _step_once(target, step)

    if not kernels_support(steps[0][1].master):
        return step_each()
    how: list[Any] = []
    tensors = [steps[0][1].constants]
    for target, (_, step) in zip(written, steps, strict=True):
        tensors += step[:-1]
        if isinstance(target, QuantizedTensor):
            quantizer = target._usage()
            how.append(quantizer)
            memory = (*target.buffers().values(), *quantizer.state_tensors())
            tensors += [tensor for tensor in memory if tensor is not None]
        else:
            how.append(target.dtype)
            tensors.append(target)
    is_repeated, _ = repeated_launches(known, tuple(how), tensors, step_each)
    if is_repeated:
        for target in written:
            _note_write(target)
    return None


class FusedAdam(_Fused):
    """Adam (Kingma and Ba, 2014) or AdamW (Loshchilov and Hutter, 2017), fused.

    Parameters in fp32 are updated by torch's kernel. Those in 16 bits, and quantized ones, are
    updated in fp32 by a kernel of this library, which writes the parameter in the same pass where
    its format allows that.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay
        As of :class:`torch.optim.AdamW`.
    bias_correction
        True alone.
    adam_w_mode
        True, the default: weight decay is apart from the gradient, AdamW.
    capturable
        The step is counted on the device, so that a CUDA graph can hold it.
    master_weights
        Keep values in fp32 of parameters in 16 bits or quantized, in the state; they begin with
        the values before quantization where these are kept.
    use_decoupled_grad
        Read gradients from ``parameter.decoupled_grad``.

    Raises
    ------
    InputError
        For ``amsgrad``, no ``bias_correction``, a negative rate, moments or master weights in
        another dtype than fp32, or remainders in place of master weights.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad:
            raise InputError(
                "FusedAdam got amsgrad=True, which is not here. Use torch.optim.Adam(amsgrad=True)."
            )
        if not bias_correction:
            raise InputError(
                "FusedAdam got bias_correction=False; moments are corrected here. Leave it out."
            )
        is_rate = isinstance(lr, torch.Tensor) or lr >= 0
        if not (is_rate and all(0 <= beta < 1 for beta in betas) and min(eps, weight_decay) >= 0):
            raise InputError(
                f"FusedAdam got lr={lr}, betas={betas}, eps={eps} and weight_decay={weight_decay}; "
                "give betas from 0 to below 1, and others that are not negative."
            )
        dtypes = (master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype)
        if set(dtypes) != {torch.float32} or store_param_remainders:
            raise InputError(
                f"FusedAdam got master_weight_dtype, exp_avg_dtype and exp_avg_sq_dtype {dtypes} "
                f"and store_param_remainders={store_param_remainders}; its state is in fp32: leave "
                "them out."
            )
        defaults = {
            "lr": lr,
            "bias_correction": True,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode, self.capturable = adam_w_mode, capturable
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self._repeated: dict[int, Cache] = {}  # of each group

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._repeated = {}

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        """Make the moments of ``param``, zeros, and its master weight."""
        self._make_moments(param, self._values(param))

    def _make_moments(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(values)

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None, grad_scaler: Any = None) -> Loss:
        """One step. ``closure`` computes the loss again, which is returned."""
        if grad_scaler is not None:
            raise InputError(
                "FusedAdam.step got a grad_scaler; it reads gradients as they are. Call "
                "grad_scaler.step(optimizer)."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [self._trained(group) for group in self.param_groups]
        for number, (group, parameters) in enumerate(zip(self.param_groups, trained, strict=True)):
            if not parameters:
                continue
            self._count(group, parameters[0].device)
            values = [self._values(p) for p in parameters]
            for parameter, value in zip(parameters, values, strict=True):
                self._make_moments(parameter, value)
            constants: dict[torch.device, torch.Tensor] = {}
            of_torch = []
            of_kernels: dict[torch.device, list[tuple[torch.Tensor, AdamWStep]]] = {}
            for parameter, value in zip(parameters, values, strict=True):
                quantized = parameter if isinstance(parameter, QuantizedTensor) else None
                is_fp32 = parameter.dtype is torch.float32 and quantized is None
                if is_fp32 or type(value) is not torch.Tensor:
                    of_torch.append((parameter, value))
                    continue
                if value.device not in constants:
                    constants[value.device] = self._constants(group, value.device)
                step = self._step(parameter, value, constants[value.device])
                if quantized is not None and not quantized._usage().is_repeatable:
                    _step_once(parameter, step)
                else:
                    of_kernels.setdefault(value.device, []).append((parameter, step))
            for steps in of_kernels.values():
                _step_together(steps, self._repeated.setdefault(number, {}))
            self._step_by_torch(group, of_torch)
        return loss

    def _step(
        self, parameter: torch.Tensor, master: torch.Tensor, constants: torch.Tensor
    ) -> AdamWStep:
        """What a kernel reads and writes in the step of a parameter."""
        gradient, state = self._gradient(parameter), self.state[parameter]
        assert gradient is not None
        if gradient.dtype is not parameter.dtype:
            gradient = gradient.float()
        moments = state["exp_avg"], state["exp_avg_sq"]
        return AdamWStep(master, as_stored(gradient).contiguous(), *moments, constants)

    def _constants(self, group: dict[str, Any], device: torch.device) -> torch.Tensor:
        lr, step = group["lr"], group["step"]
        is_on_device = isinstance(lr, torch.Tensor) or isinstance(step, torch.Tensor)
        options: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        if is_on_device:
            options["device"] = device
        step, lr = (
            one.to(**options).reshape(())
            if isinstance(one, torch.Tensor)
            else torch.full((), one, **options)  # no copy, which a CUDA graph cannot hold
            for one in (step, lr)
        )
        constants = constants_of(
            step,
            lr,
            group["betas"],
            group["eps"],
            group["weight_decay"],
            is_decoupled=self.adam_w_mode,
        )
        return constants.to(device, non_blocking=True)

    def _step_by_torch(
        self, group: dict[str, Any], parameters: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Update parameters, given with their values in fp32, by torch's kernel."""
        if parameters:
            trained = [parameter for parameter, _ in parameters]
            values = [value for _, value in parameters]
            states = [self.state[p] for p in trained]
            # torch's kernel counts the step of each tensor on.
            steps = (group["step"] - 1) * torch.ones(len(values), device=values[0].device)
            beta1, beta2 = group["betas"]
            adam(
                values,
                self._gradients(trained, values),
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                list(steps.unbind()),
                fused=True,
                grad_scale=None,
                found_inf=None,
                decoupled_weight_decay=self.adam_w_mode,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for parameter, updated in parameters:
                self._write(parameter, updated)

    def _count(self, group: dict[str, Any], device: torch.device) -> None:
        step = group.get("step", 0)
        if self.capturable:
            if not isinstance(step, torch.Tensor):
                step = torch.tensor(float(step), device=device)
            step = step.to(device)  # a loaded one may be on the CPU
            group["step"] = step.add_(1)
        else:
            group["step"] = step + 1


class FusedSGD(_Fused):
    """Stochastic gradient descent, with torch's fused kernel.

    Parameters
    ----------
    params, lr, momentum, dampening, weight_decay, nesterov
        As of :class:`torch.optim.SGD`.
    wd_after_momentum
        False alone.
    materialize_master_grads
        Accepted, no effect: gradients are read as they are.
    master_weights
        As of :class:`FusedAdam`.

    Raises
    ------
    InputError
        If weight decay is asked for after momentum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        master_weights: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if wd_after_momentum:
            raise InputError(
                "FusedSGD got wd_after_momentum=True; weight decay is added to the gradient before "
                "momentum. Leave it out."
            )
        if nesterov and (momentum <= 0 or dampening):
            raise InputError(
                f"FusedSGD got nesterov=True with momentum={momentum} and dampening={dampening}; "
                "it needs a momentum and no dampening."
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)
        self.master_weights = master_weights

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss:
        """One step. ``closure`` computes the loss again, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        all_trained = [self._trained(group) for group in self.param_groups]
        for group, trained in zip(self.param_groups, all_trained, strict=True):
            has_begun = [bool(self.state[p].get("momentum_buffer") is not None) for p in trained]
            for begun in (False, True):
                chosen = zip(trained, has_begun, strict=True)
                self._update(group, [p for p, has in chosen if has is begun])
        return loss

    def _update(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Update parameters that all have a momentum, or none."""
        if parameters:
            values = [self._values(p) for p in parameters]
            momenta = [self.state[p].get("momentum_buffer") for p in parameters]
            sgd(
                values,
                self._gradients(parameters, values),
                momenta,
                has_sparse_grad=False,
                # torch's kernel knows no DTensors.
                fused=not any(hasattr(value, "_local_tensor") for value in values),
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=False,
            )
            for parameter, updated, momentum in zip(parameters, values, momenta, strict=True):
                if group["momentum"]:
                    self.state[parameter]["momentum_buffer"] = momentum
                self._write(parameter, updated)


# -- lists of tensors ----------------------------------------------------------------

Lists = Sequence[Sequence[torch.Tensor]]


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag: torch.Tensor, tensor_lists: Lists, *args: Any
) -> Any:
    """Call ``op`` on lists of tensors, as Apex's function of this name."""
    return op(0, noop_flag, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The norm ``[1]`` of all tensors of the first list, in fp32, and of each if ``per_tensor``."""
    (tensors,) = tensor_lists
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    device = tensors[0].device if tensors else noop_flag.device
    each = torch.stack(norms) if norms else torch.zeros(0, device=device)
    return torch.linalg.vector_norm(each).reshape(1), each if per_tensor else None


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float | torch.Tensor
) -> None:
    """Write the tensors of the first list, times ``scale``, into those of the second.

    ``noop_flag`` becomes 1 if a value is not finite.
    """
    sources, targets = tensor_lists
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source.to(torch.promote_types(source.dtype, torch.float32)) * scale)
        is_finite = torch.isfinite(target).all()
        noop_flag.logical_or_(~is_finite)


multi_tensor_scale_tensor = multi_tensor_scale
"""The name of newer versions for a ``scale`` that is a tensor of one element, never read here."""
