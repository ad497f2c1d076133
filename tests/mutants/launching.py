"""Mistakes in the launch cache: what a noted launch is known by, and what is made again."""

from mutants.mutant import Mutant

LAUNCH_CACHE = (
    Mutant(
        "the alignment of a tensor is left out of a launch's key",
        "cuda/launch_cache.py",
        "key.append(tensor.data_ptr() & 15)",
        "key.append(0)",
        "test_launch_cache.py::test_a_tensor_of_another_layout_is_recorded_anew",
    ),
    Mutant(
        "the strides of a tensor are left out of a launch's key",
        "cuda/launch_cache.py",
        "tensor.shape, tensor.stride(), tensor.get_device()",
        "tensor.shape, tensor.get_device()",
        "test_launch_cache.py::test_a_tensor_of_another_layout_is_recorded_anew",
    ),
    Mutant(
        "an absent tensor leaves no place in a launch's key",
        "cuda/launch_cache.py",
        "            key.append(None)\n",
        "            pass\n",
        "test_launch_cache.py",
    ),
    Mutant(
        "one tensor in two places is taken for two",
        "cuda/launch_cache.py",
        "if len(set(given)) < len(given):",
        "if not given:",
        "test_launch_cache.py::test_one_tensor_as_two_arguments_has_an_entry_of_its_own",
    ),
    Mutant(
        "what torch computes beside the launches is not made again",
        "cuda/launch_cache.py",
        "        elif not func.is_view:\n",
        "        elif not func.is_view and func._schema.is_mutable:\n",
        "test_launch_cache.py::test_a_function_that_does_more_is_called_every_time "
        "test_launch_cache.py::test_a_stochastic_quantizer_draws_new_numbers_at_each_call",
    ),
    Mutant(
        "memory that was zeroed is not zeroed again",
        "cuda/launch_cache.py",
        "made.dtype, made.device, func in _ZEROING)",
        "made.dtype, made.device, False)",
        "test_launch_cache.py",
    ),
    Mutant(
        "on a GPU, memory that was zeroed is not zeroed again",
        "cuda/launch_cache.py",
        "if is_zeroed and 0 not in shape:",
        "if not is_zeroed and 0 in shape:",
        "test_launch_cache.py",
    ),
    Mutant(
        "a view of a part of a tensor passes for the tensor",
        "cuda/launch_cache.py",
        "        and (one.dtype, one.shape, one.stride())"
        " == (other.dtype, other.shape, other.stride())\n",
        "",
        "test_launch_cache.py::test_a_cached_launch_returns_the_same_view_of_its_allocation",
    ),
    Mutant(
        "the 2D flag is left out of MXFP8's key",
        "tensors/mxfp8.py",
        'return "mx", self.fp8_dtype, self.rowwise, self.columnwise, self.with_2d_quantization',
        'return "mx", self.fp8_dtype, self.rowwise, self.columnwise',
        "test_launch_keys.py",
        select="MXFP8Quantizer.with_2d",
    ),
    Mutant(
        "power-of-two scales are left out of current scaling's key",
        "tensors/fp8.py",
        "*copies, self.force_pow_2_scales, self.amax_epsilon)",
        "*copies, self.amax_epsilon)",
        "test_launch_keys.py",
        select="CurrentScalingQuantizer.force_pow",
    ),
    Mutant(
        "eps is left out of block scaling's key",
        "tensors/block_scaling.py",
        "scales = (self.block_scaling_dim, self.force_pow_2_scales, self.amax_epsilon)",
        "scales = (self.block_scaling_dim, self.force_pow_2_scales)",
        "test_launch_keys.py",
        select="BlockQuantizer.amax_epsilon",
    ),
    Mutant(
        "the copies are left out of delayed scaling's key",
        "tensors/fp8.py",
        'return "delayed", self.fp8_dtype, self.rowwise, self.columnwise',
        'return "delayed", self.fp8_dtype',
        "test_launch_keys.py",
        select="Float8Quantizer.rowwise or Float8Quantizer.columnwise",
    ),
    Mutant(
        "a norm's eps is left out of its key",
        "functional/normalization.py",
        'what = ("norm", self.eps, self.dtype, self.zero_centered, count, is_measured)',
        'what = ("norm", self.dtype, self.zero_centered, count, is_measured)',
        "test_launch_keys.py",
        select="_Norm.eps",
    ),
    Mutant(
        "a chain's saved stages are left out of its backward's key",
        "functional/pointwise.py",
        "return (self.stages, self.saved), (self.dy, self.x, *self.operands, *self.grads)",
        "return self.stages, (self.dy, self.x, *self.operands, *self.grads)",
        "test_launch_keys.py",
        select="_Backward.saved",
    ),
    Mutant(
        "the margin is left out of the key of delayed scaling's update",
        "functional/delayed_scaling.py",
        '("update_delayed", margin, algorithm, len(scales)),',
        '("update_delayed", algorithm, len(scales)),',
        "test_launch_cache.py::test_cached_updates_of_delayed_scales_depend_on_margin_and_algorithm",
    ),
)
