"""The test files that ``make test-fast`` leaves out, and the check that no other file is slow."""

from __future__ import annotations

from collections.abc import Mapping

SLOW_SECONDS = 4.0
"""A file whose tests take more CPU seconds than this, on warm caches, belongs into the list."""
ALLOWED_SECONDS = 15.0
"""A file outside the list that takes more than this fails the run: times vary with the machine.

Of the test process alone: what g++ compiles for the emulator comes from a cache or does not."""

SLOW_FILES = frozenset(
    (
        "test_amax_reduction.py",
        "test_autograd_nodes.py",
        "test_backward_override.py",
        "test_bad_input.py",
        "test_call_key.py",
        "test_command_line.py",
        "test_compare_recipes.py",
        "test_compile.py",
        "test_compile_failure.py",
        "test_cuda_block_scaling.py",
        "test_cuda_chain_stores.py",
        "test_cuda_fp8_scaling.py",
        "test_cuda_grouped.py",
        "test_cuda_grouped_gemm.py",
        "test_cuda_mxfp8.py",
        "test_cuda_norm_stores.py",
        "test_cuda_normalization.py",
        "test_cuda_nvfp4.py",
        "test_cuda_permutation.py",
        "test_cuda_pointwise.py",
        "test_cuda_rowwise_scaling.py",
        "test_data_parallel.py",
        "test_default_device.py",
        "test_delayed_parameters.py",
        "test_delayed_scaling.py",
        "test_demo.py",
        "test_dispatched_experts.py",
        "test_documents.py",
        "test_draw.py",
        "test_dtensor_parameters.py",
        "test_emulated_sm90.py",
        "test_emulator.py",
        "test_executor.py",
        "test_expert_parallel.py",
        "test_extending.py",
        "test_fusions.py",
        "test_grouped_mlp.py",
        "test_grouping.py",
        "test_kept_weight.py",
        "test_kernel_benchmarks.py",
        "test_kernels_in_pipelines.py",
        "test_launch_keys.py",
        "test_low_precision.py",
        "test_memory_benchmark.py",
        "test_mesh_experts.py",
        "test_mixed_residuals.py",
        "test_moe_ops.py",
        "test_mutants.py",
        "test_operand_flow.py",
        "test_ops.py",
        "test_other_machines.py",
        "test_padding.py",
        "test_parallel_ops.py",
        "test_planner.py",
        "test_quantized_compile.py",
        "test_quantized_gemm.py",
        "test_quantized_parameters.py",
        "test_quantized_views.py",
        "test_random_pipelines.py",
        "test_rank_failure.py",
        "test_recomputation.py",
        "test_recorded.py",
        "test_recorded_experts.py",
        "test_recorded_microbatches.py",
        "test_sharded_experts.py",
        "test_sharded_benchmarks.py",
        "test_sharded_demo.py",
        "test_sharded_parameters.py",
        "test_slow_files.py",
        "test_state.py",
        "test_step_memory.py",
        "test_tensor_parallel.py",
        "test_testing.py",
        "test_typed_script.py",
        "test_vectorization.py",
    )
)


def unlisted(seconds: Mapping[str, float]) -> dict[str, float]:
    """The files outside the list that took more than they may, of all files' CPU seconds."""
    return {
        file: taken
        for file, taken in seconds.items()
        if taken > ALLOWED_SECONDS and file not in SLOW_FILES
    }
