"""Mistakes in what users extend fuser with: kernels, stages, checks."""

from mutants.mutant import Mutant

EXTENDING = (
    Mutant(
        "an edited header of a user is no new key of the compiler's cache",
        "cuda/sources.py",
        "own_options",
        "digest.update(contents)",
        "digest.update(b'')",
        "test_extending.py::test_an_edited_header_of_a_user_is_compiled_anew",
    ),
    Mutant(
        "a user's kernel that does not compile turns off the library's",
        "cuda/module.py",
        "_compiled",
        "if own and isinstance(error, cupy.cuda.compiler.CompileException):",
        "if not own and isinstance(error, cupy.cuda.compiler.CompileException):",
        "test_extending.py::"
        "test_a_users_kernel_that_does_not_compile_is_an_error_and_leaves_others_alone",
    ),
    Mutant(
        "a header is included for a struct whose name only begins like its own",
        "chain.py",
        "headers_in",
        'rf"(?<![\\w:]){traits.struct}(?!\\w)", text)',
        'rf"(?<![\\w:]){traits.struct}", text)',
        "test_extending.py::test_the_compiler_includes_headers_of_the_stages_in_a_symbol",
    ),
    Mutant(
        "a stage that is registered twice keeps the functions of the first time",
        "chain.py",
        "register",
        "STAGES[name] = row",
        "STAGES.setdefault(name, row)",
        "test_extending.py::test_a_module_that_registers_its_stage_is_imported_twice",
    ),
    Mutant(
        "a gradient of a tensor that needs none must have its shape",
        "runtime/diagnose.py",
        "check_grad_shapes",
        "if grad is not None and shape is not None:",
        "if grad is not None:",
        "test_constant_quantizers.py::"
        "test_a_gradient_of_a_tensor_that_needs_none_may_have_any_shape",
    ),
    Mutant(
        "a subclass with another forward is the stage that its base is",
        "plan/window.py",
        "_tells",
        "return all(owner <= _owner(cls, name) for",
        "return all(owner <= 99 + _owner(cls, name) for",
        "test_extending.py::test_a_subclass_that_computes_otherwise_is_no_stage",
    ),
    Mutant(
        "check compares fused ops with themselves",
        "testing/check.py",
        "check",
        "if subject.fusions:\n    unfused = run(())",
        "if subject.fusions:\n    unfused = run(subject.fusions)",
        "test_testing.py::test_a_fusion_that_forgets_its_bias_is_found",
    ),
    Mutant(
        "check does not give backward_override to recipes",
        "testing/check.py",
        "_with_overrides",
        "yield replace(recipe, backward_override=override)",
        "yield recipe",
        "test_testing.py::test_a_mistake_under_one_backward_override_is_found",
    ),
    Mutant(
        "check takes slopes of the fine step for formulas in fp32",
        "testing/finite_differences.py",
        "wrong_slope",
        "if is_fp32:",
        "if not is_fp32:",
        "test_testing.py::test_ops_of_the_library_and_modules_pass",
    ),
    Mutant(
        "float64 is taken after allow_float64",
        "op/parameters.py",
        "allow_float64",
        "_dtypes.reset(token)",
        "pass",
        "test_testing.py::test_gradcheck_works_where_float64_is_allowed",
    ),
)
