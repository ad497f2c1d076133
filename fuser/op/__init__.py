"""Operations: base classes and functions for authors of ops and fusions."""

from fuser.op.arguments import (
    QUANTIZER_ARGUMENTS,
    is_plain,
    keyword_names,
    method_of,
    pipeline_arguments,
)
from fuser.op.basic import MAX_RECIPES, BasicOperation, Counter
from fuser.op.context import OperationContext, autocast_dtype, context_of
from fuser.op.fused import FusedOperation
from fuser.op.fusible import COMPUTE_METHODS, METHODS, CallResult, FusibleOperation
from fuser.op.parameters import (
    COMPUTE_DTYPES,
    ParallelMode,
    check_parallel_mode,
    check_parameter,
    check_sizes,
    default_device,
    default_dtype,
    fill_weight,
)
from fuser.op.state import HiddenOps, Stateful, is_tried, modules_and_ops, plain_keys
from fuser.op.step import (
    Contexts,
    Grads,
    StepGrads,
    StepInputs,
    StepOutputs,
    Tensors,
    Values,
    cast,
    quantizes_values,
    rows,
    write_grad_input,
    write_output,
)

__all__ = [
    "BasicOperation",
    "COMPUTE_DTYPES",
    "COMPUTE_METHODS",
    "CallResult",
    "Contexts",
    "Counter",
    "FusedOperation",
    "FusibleOperation",
    "Grads",
    "HiddenOps",
    "MAX_RECIPES",
    "METHODS",
    "OperationContext",
    "ParallelMode",
    "QUANTIZER_ARGUMENTS",
    "Stateful",
    "StepGrads",
    "StepInputs",
    "StepOutputs",
    "Tensors",
    "Values",
    "autocast_dtype",
    "cast",
    "check_parallel_mode",
    "check_sizes",
    "context_of",
    "check_parameter",
    "default_device",
    "default_dtype",
    "fill_weight",
    "is_plain",
    "is_tried",
    "keyword_names",
    "method_of",
    "modules_and_ops",
    "pipeline_arguments",
    "plain_keys",
    "quantizes_values",
    "rows",
    "write_grad_input",
    "write_output",
]
