"""Mistakes in the inspector of quantized steps."""

from mutants.mutant import Mutant

INSPECTION = (
    Mutant(
        "to show a gradient that is not written writes the gradient of its bias again",
        "functional/pointwise.py",
        "other.grads, other.group_dbias = (None,) * len(self.stages), None",
        "other.group_dbias = None",
        "test_inspection.py::test_sums_beside_a_quantized_gradient_keep_their_order_on_kernels",
    ),
    Mutant(
        "an inspected call repeats a recording, which shows nothing",
        "runtime/executor.py",
        "layout is not None and steps is None:",
        "layout is not None:",
        "test_inspection.py::test_an_inspected_step_on_kernels_has_the_bits_of_any_other",
        select="current or delayed",
    ),
    Mutant(
        "an inspected call replays a CUDA graph, which shows nothing",
        "runtime/graphed.py",
        "if observing.steps is not None:",
        "if False:",
        "test_inspection.py::test_an_inspected_call_replays_no_graph",
    ),
    Mutant(
        "a recomputation counts as another forward",
        "precision/contexts.py",
        "observing.steps, observing.is_repeated = conditions.inspected, True",
        "observing.steps, observing.is_repeated = conditions.inspected, False",
        "test_inspection.py::test_a_recomputation_is_not_counted_again",
    ),
    Mutant(
        "copies that a recomputation makes alone are not shown",
        "inspection/report.py",
        "if is_repeated and key in self._sums:",
        "if is_repeated:",
        "test_inspection.py::test_a_recomputation_is_not_counted_again",
    ),
    Mutant(
        "the recomputation of a whole model is a step of its own",
        "inspection/inspector.py",
        "in_training and not is_recomputation()",
        "in_training",
        "test_inspection.py::test_a_recomputation_is_not_counted_again",
    ),
    Mutant(
        "bytes that backward quantizes again count twice",
        "tensors/observation.py",
        " and not operand._is_transposable()",
        "",
        "test_inspection.py::test_an_inspected_step_has_the_bits_of_any_other",
        select="current or delayed",
    ),
    Mutant(
        "values that round to the largest one count as saturated",
        "inspection/measure.py",
        "return top + (top - below) / 2",
        "return top",
        "test_inspection.py::test_values_too_large_for_a_scale_of_an_earlier_step_saturate",
    ),
    Mutant(
        "rows of no group count as values",
        "inspection/measure.py",
        "return (groups.ends[-1:] * values.shape[1]).double()",
        "return (groups.ends[-1:] * 0 + values.numel()).double()",
        "test_inspection.py::test_the_rows_of_experts_add_up_and_their_padding_does_not_count",
    ),
    Mutant(
        "the worst operand of a product decides alone",
        "inspection/report.py",
        "noise = sum(10 ** (-ratio / 10) for ratio, _ in known)",
        "noise = max(10 ** (-ratio / 10) for ratio, _ in known)",
        "test_inspection.py::test_the_ratio_of_a_ranked_product_is_that_of_its_result",
    ),
)
