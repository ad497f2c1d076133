"""Cures of messages that do not say one, for docs/troubleshooting.md.

A message has the cure of its code, or that of the first place that fits. A message that tells what
to do needs none; tests/docs/test_site.py fails for a message with neither, and for a cure of no
message.
"""

from __future__ import annotations

LAUNCHER = (
    "A launcher got operands of another shape, dtype or layout than it takes. If you have "
    "called it, from a kernel or an op of your own, pass what the message names. If a layer "
    "of fuser has called it, report the message with the plan, `print(model.plan(x))`."
)
UNCONVERTED = (
    "The module runs as it was written. To convert it, write its forward without what the message "
    "names; or leave it out by `fuser.convert(..., filter=)`, and the report does not list it."
)
CHANGED = (
    "The forward that the module had before runs, with the values that it has now. Undo the "
    "change, or call `fuser.revert(model)`, change the model, and convert it again."
)
OWN_OP = (
    "An op or fusion of your own returns other tensors than the engine asks for. Return what the "
    "message names; `fuser.testing.check(op, x)` tests it alone."
)
COMPILED = (
    "Call `torch.compiler.reset()` and compile again. If it comes back, report it, with the model."
)
KEPT = (
    "Nothing is wrong: the note says why the memory is needed. To free it, leave out what the note "
    "names; the page on memory has what else makes a step smaller."
)
EXCEPTION = (
    "The exception is one of your code, and the command ends: correct the code, and run it again."
)

UNRECORDED = (
    "Nothing is wrong: the plan says why its steps run one by one, which takes more time of the "
    "host. Put what the note names into a pipeline of its own; the rest is then repeated."
)
UNCAPTURED = (
    "Capture the parts before and after this op; or make the op without that argument, and "
    "experts with a capacity."
)
MISSING = "The end of the message has the name that is there, if there is one like it."

CURES: dict[str, str] = {
    "backward-activation-bias-needs-no-gradient": (
        "Nothing: there is less to do without this fusion."
    ),
    "channels-asks-extra-number": "Give an int, counted from 0.",
    "compiled-runner-recording-incomplete": COMPILED,
    "compiled-runner-returned-no-gradient": OWN_OP,
    "convert-strict-true-converted": (
        "Correct the modules that the message names, leave them out by `filter=`, or leave "
        "`strict` out."
    ),
    "cublaslt-failed-status": (
        "`python -m fuser doctor` says which cuBLASLt was loaded: install the one of your torch."
    ),
    "delayed-scaling-reduces-amaxes": (
        "The beginning of the message has the cure: the process group, or when it is called."
    ),
    "dispatch-gives-shape": "Use the form of the function that returns a new tensor.",
    "dispatched-experts-under-each-group": (
        "The ops run one by one, or rows are gathered in memory, with the same values. Use a "
        "recipe that this device has grouped products of; `python -m fuser doctor` lists formats."
    ),
    "doors-parallel-linear-over": "Import it before the model is made.",
    "errors-module-no-attribute": MISSING,
    "errors-twice-place": "Give it once.",
    "fusible-init-does-not": "Call super().__init__() first in the __init__ of the class.",
    "gathering-fsdp-pre-gather": (
        "Gather by fully_shard, with a release of torch that the installation page names."
    ),
    "graph-runs-inside-window": (
        "The ops run one by one, with the same values: a fused op gets its inputs before it runs."
    ),
    "graphed-comes-too-late": (
        "Call backward() before the next call of the module, or capture a module for each call."
    ),
    "graphs-delay-wgrad-compute": UNCAPTURED,
    "graphs-experts-several-ranks": UNCAPTURED,
    "graphs-op-process-groups": UNCAPTURED,
    "groups-made-planned-nothing": (
        "Make the model again in each process of the group, under torchrun, to run it."
    ),
    "launch-kernels-run-cuda": "Torch does their work. Move the model to a GPU for the kernels.",
    "linear-epilogues-addend-torch-cublaslt": (
        "Install CUDA's libraries: `python -m fuser doctor` names them."
    ),
    "linear-epilogues-gemm-emulated-epilogue": (
        "The ops run one by one, with the same values. Use a recipe that this device has products "
        "of; `python -m fuser doctor` lists formats."
    ),
    "linear-epilogues-may-record-amax": (
        "The scale is an op of its own in backward, with the same values. A recipe whose scales "
        "follow from the tensor, such as Float8CurrentScaling, fuses it."
    ),
    "linear-epilogues-parallel-over-tensor": (
        "Nothing: the addend is added by an op of its own, after the reduction."
    ),
    "linear-epilogues-products-first-after": (
        "Nothing: the sum over ranks comes first, and the bias is an op of its own."
    ),
    "lora-adapters-is": "Call merge() and unmerge() in turn; `is_merged` says which is next.",
    "main-cannot-written": "Give a file in a folder that you may write to.",
    "main-importing-raised": EXCEPTION,
    "main-raised": EXCEPTION,
    "module-torch-work-kernels": (
        "Torch does the work of all kernels, with the same values. `python -m fuser doctor` says "
        "what to install; the beginning of the message is the reason."
    ),
    "peft-quantized-init-lora": (
        "Use `init_lora_weights=True` without DoRA, or a weight of 16 or 32 bits."
    ),
    "peft-takes-no-adapters": (
        "Name another target: the rest of the message says which, or why this one cannot have "
        "adapters."
    ),
    "report-nothing-quantized-ops": (
        "Choose a recipe and shapes that the ops take: the message has the reason of each."
    ),
    "reshape-input-whose-elements": "Give an input whose elements the shape divides.",
}
"""Of single messages, by their codes in messages.tsv."""

CURES_OF_PLACES: tuple[tuple[str, str, str], ...] = (
    (
        "basic_ops/linear_epilogues.py",
        "refusal",
        "The bias is an op of its own, with the same values. Give weight and bias one dtype and "
        "one size.",
    ),
    (
        "basic_ops/normalization.py",
        "refusal",
        "The sum is an op of its own, with the same values. Give both inputs one dtype.",
    ),
    ("conversion/chains.py", "ValueError", UNCONVERTED),
    ("conversion/converted.py", "refusal", UNCONVERTED),
    ("conversion/experts.py", "refusal", CHANGED),
    ("conversion/held_objects.py", "RuntimeError", UNCONVERTED),
    ("conversion/parts.py", "refusal", CHANGED),
    ("conversion/allowed.py", "Untraceable", UNCONVERTED),
    ("conversion/held_objects.py", "Untraceable", UNCONVERTED),
    ("conversion/trace.py", "Untraceable", UNCONVERTED),
    ("conversion/unit.py", "refusal", CHANGED),
    (
        "cuda/module.py",
        "KernelUnavailable",
        "Torch computes it. `python -m fuser doctor` says what to install for the kernel.",
    ),
    (
        "cuda/module.py",
        "StateError",
        "Report it: an entry of a compiled kernel is not there under its name.",
    ),
    (
        "cuda/sequence.py",
        "refusal",
        "The pipeline is called op by op, with the same kernels and values. To record its "
        "launches, write an op of your own without what the message names.",
    ),
    ("cuda/sources.py", "StateError", "Install fuser again: sources of kernels are missing."),
    ("cuda/", "Input", LAUNCHER),
    (
        "fused_ops/dispatched_experts.py",
        "refusal",
        "The rows are gathered in memory, with the same values. Experts that gather rows as these"
        " are read need a recipe, and a device with grouped products of its format.",
    ),
    (
        "fused_ops/grouped_mlp.py",
        "refusal",
        "The ops run one by one, with the same values. Give both linears as many groups and one "
        "dtype.",
    ),
    (
        "fused_ops/pointwise_fusions.py",
        "refusal",
        "The ops run in two kernels, or in torch, with the same values. Give them one dtype, and "
        "gate once.",
    ),
    (
        "fused_ops/",
        "refusal",
        "The ops run one by one, with the same values. Give both tensors one dtype.",
    ),
    (
        "integrations/peft.py",
        "refusal",
        "Name a linear of fuser or torch in `target_modules`; it has adapters of its own if it is"
        " a LoRALinear.",
    ),
    (
        "plan/planner.py",
        "refusal",
        "Nothing, if no gradient is wanted. Else call requires_grad_() on the input or parameters.",
    ),
    ("plan/cover.py", "refusal", "Nothing: the plan that was chosen takes no longer."),
    ("plan/planner.py", "StateError", "Correct the fusion: its reason is the end of the message."),
    (
        "plan/planner.py",
        "warning",
        "Correct the fusion, whose exception is the end of the message; until then the ops run "
        "without it.",
    ),
    ("plan/registered.py", "StateError", "Return ops that replace each op of the pipeline once."),
    ("plan/kept.py", "refusal", KEPT),
    ("runtime/recorded.py", "refusal", UNRECORDED),
    (
        "precision/availability.py",
        "warning",
        "Nothing is wrong: values are those of the recipe. For speed use a recipe that the message "
        "names as native, or 16 bits.",
    ),
    ("reference/mxfp8.py", "InputError", LAUNCHER),
    ("runtime/compiled_values.py", "StateError", COMPILED),
    ("runtime/diagnose.py", "StateError", OWN_OP),
    (
        "runtime/model_plan.py",
        "InputError",
        "Give inputs with which `model(*inputs)` runs. A forward that reads values cannot be "
        "planned as a whole: plan its parts, `model.part.plan(x)`.",
    ),
    (
        "runtime/graph_parameters.py",
        "StateError",
        "Export or compile the model before fully_shard; call clear_high_precision_init_val() on "
        "its parameters, and give a clone() in place of a view.",
    ),
    (
        "runtime/segments.py",
        "refusal",
        "The ops run without one pipeline over both sides of the hook, with the same values. "
        "Remove the hook, or put it on the Sequential.",
    ),
    (
        "runtime/segments.py",
        "StateError",
        "Return a tuple of that length from the hook or the forward.",
    ),
    (
        "runtime/traced.py",
        "StateError",
        "Change what the end of the message names, or export the model without this part.",
    ),
    ("runtime/users_methods.py", "StateError", OWN_OP),
    ("tensors/quantizer.py", "KernelUnavailable", "Nothing: torch computes it."),
    ("testing/check.py", "AssertionError", OWN_OP),
)
"""Of the other messages, by a file or folder below ``fuser/`` and how their kind begins."""
