"""The command line: ``python -m fuser demo | plan MODEL | scale | doctor | te -- SCRIPT``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fuser.conversion import convert
from fuser.errors import FuserError, InputError, InputTypeError, StateError
from fuser.modules.decoder import Decoder
from fuser.op import COMPUTE_DTYPES
from fuser.plan.devices import DEVICES, device_named
from fuser.plan.model import ModelPlan
from fuser.plan.plan import FusionPlan
from fuser.plan.transformers import PRESETS
from fuser.precision.contexts import autocast
from fuser.recipe import NAMES, recipe_named
from fuser.report.draw import drawable
from fuser.runtime.model_plan import plan as plan_model
from fuser.sequential import Sequential
from fuser.te import import_paths as te_paths
from fuser.testing.doctor import diagnose
from fuser.version import __version__

# Rows of the input to plan for; bytes a token do not depend on this number.
ROWS = 8192

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in COMPUTE_DTYPES}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0 is success. 2 is a mistake of the user, explained by one sentence on stderr.
    ``doctor`` returns 1 if an installed component is broken, and ``demo`` returns
    the status of the demo.
    """
    parser = _parser()
    try:
        options, rest = parser.parse_known_args(argv)
        if rest and options.command not in ("demo", "scale"):
            hint = "; put -- before the script" if options.command == "te" else ""
            parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    except SystemExit as stop:  # argparse has printed its help or its error
        return int(stop.code or 0)
    try:
        if options.command in ("demo", "scale"):
            return {"demo": _demo, "scale": _scale}[options.command](rest)
        if options.command == "te":
            te_paths.install(options.version)
            script = te_paths.program(options.script)
        else:
            return {"plan": _plan, "doctor": _doctor}[options.command](options)
    except FuserError as error:
        print(error, file=sys.stderr)
        return 2
    return _te(script, shows_missing=options.missing)  # an error of the script has a traceback


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fuser", description="Pipelines of basic operations, planned on a graph and run fused."
    )
    parser.add_argument("--version", action="version", version=f"fuser {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "demo",
        help="train a small language model; `demo --help` lists its options",
        add_help=False,
    )
    plan = commands.add_parser(
        "plan",
        help="print the fusion plan of a model",
        description="Print the fusion plan of a model of a public size, as fuser.convert makes it, "
        "or of your own. Nothing runs but FACTORY itself.",
    )
    plan.add_argument(
        "model",
        metavar="MODEL",
        help=f"{', '.join(PRESETS)}; or MODULE:FACTORY, a dotted module name or a .py file, and a "
        "function in it that takes nothing and returns a module, or a tuple of one and its inputs",
    )
    plan.add_argument(
        "--device",
        metavar="NAME",
        help=f"plan for it: {', '.join(DEVICES)}; default: h200 for public sizes",
    )
    plan.add_argument("--recipe", metavar="NAME", help=f"{', '.join(NAMES)}; default: none")
    plan.add_argument("--tokens", metavar="N", help=f"rows of the main input; default: {ROWS}")
    plan.add_argument(
        "--training",
        action="store_true",
        help="plan forward and backward; of public sizes also loss and optimizer",
    )
    plan.add_argument("--draw", metavar="FILE", help="also draw it, as .svg, .png or .html")
    plan.add_argument("--json", action="store_true", help="print JSON instead of text")
    plan.add_argument("--input", metavar="SHAPE", help=f"shape of the main input, e.g. {ROWS}x1024")
    plan.add_argument(
        "--dtype", help=f"convert model and inputs: {', '.join(DTYPES)}; default: as they are"
    )
    commands.add_parser(
        "scale",
        help="forecast a training step on many GPUs; takes the options of fuser_forecast",
        add_help=False,
    )
    te = commands.add_parser(
        "te",
        help="run a program written for Transformer Engine, which then imports fuser",
        description="Run a Python script, or a module after -m, in which `import "
        "transformer_engine` gives fuser: python -m fuser te -- SCRIPT ARGUMENTS.",
    )
    te.add_argument("--version", default=te_paths.VERSION, help="told to programs; %(default)s")
    te.add_argument("--missing", action="store_true", help="print what was asked for and not here")
    te.add_argument("script", nargs="+", metavar="SCRIPT", help="and its arguments")
    doctor = commands.add_parser("doctor", help="say what this machine can run and what is missing")
    doctor.add_argument("--json", action="store_true", help="print values for programs")
    return parser


# -- the commands -------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    diagnosis = diagnose()
    print(json.dumps(diagnosis.to_dict(), indent=2) if options.json else diagnosis)
    return diagnosis.exit_status


def _demo(args: list[str]) -> int:
    from fuser.demo import train_lm  # loads much of torch that other commands do not need

    return train_lm.main(args, time.perf_counter() - _age() if __name__ == "__main__" else None)


def _age() -> float:
    """The seconds since this process began, of which imports took most."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not on Linux: without the time of waiting
        return time.process_time()


def _te(script: Callable[[], None], *, shows_missing: bool) -> int:
    try:
        script()
    finally:
        if shows_missing:
            names = te_paths.missing()
            for name, count in names.items():
                print(f"{count:5}  {name}", file=sys.stderr)
            if not names:
                print("Nothing that was asked for is missing.", file=sys.stderr)
    return 0


def _scale(args: list[str]) -> int:
    try:
        forecast = importlib.import_module("fuser_forecast.command")
    except ModuleNotFoundError as error:
        if error.name != "fuser_forecast":
            raise
        raise StateError(
            "Forecasts are a package of their own, fuser-forecast, which is not installed: run "
            "`pip install ./forecast` in fuser's source repository."
        ) from error
    status: int = forecast.main(args)
    return status


def _plan(options: argparse.Namespace) -> int:
    shape = None if options.input is None else _shape(options.input)
    dtype = None if options.dtype is None else _dtype(options.dtype)
    rows = ROWS if options.tokens is None else _tokens(options.tokens)
    if shape is not None and options.tokens is not None:
        raise InputError(
            f"--input {options.input} and --tokens {options.tokens} both give rows; give one."
        )
    recipe = None if options.recipe is None else recipe_named(options.recipe)
    if options.device is not None:
        device_named(options.device)
    if options.draw is not None:
        drawable(options.draw)  # raises before anything is made or printed
    model, inputs = _made_by(options.model, dtype or torch.bfloat16, rows, shape)
    if isinstance(model, Decoder):
        inputs = model.example(rows, training=options.training)
        convert(model, recipe=recipe)
    if dtype is not None:
        model.to(dtype)
        inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    if shape is not None or not inputs:
        main_input = torch.empty(
            shape or _default_shape(model, rows),
            dtype=inputs[0].dtype if inputs else _dtype_of(model),
            device="meta",
            # In training, the layer before a model usually needs a gradient.
            requires_grad=options.training,
        )
        inputs = (main_input, *inputs[1:])
    how = {"training": options.training}
    # Models of public sizes are planned for a GPU, which need not be here.
    is_public = isinstance(model, Decoder)
    device = "h200" if is_public and options.device is None else options.device
    how |= {} if device is None else {"device": device}
    with autocast(enabled=recipe is not None, recipe=recipe):
        plan: FusionPlan | ModelPlan
        if isinstance(model, Sequential):
            plan = model.plan(*inputs, **how)
        else:
            plan = plan_model(model, *inputs, **how)
            if isinstance(model, Decoder):
                argument = "" if recipe is None else f', recipe="{options.recipe}"'
                name = f"{model.sizes.name} after fuser.convert(model{argument})"
                plan = replace(plan, name=name)
                plan = plan.with_adamw(model.parameters()) if plan.training else plan
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan)
    if options.draw is not None:
        # With --json, stdout is JSON and nothing else.
        try:
            where = plan.draw(options.draw)
        except OSError as error:
            raise InputError(f"{options.draw!r} cannot be written: {error.strerror}.") from error
        print(f"\nDrawn into {where}.", file=sys.stderr if options.json else sys.stdout)
    return 0


# -- the model and its input --------------------------------------------------


def _made_by(
    target: str, dtype: torch.dtype, rows: int, shape: tuple[int, ...] | None
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The model of a public size, or that ``MODULE:FACTORY`` makes; and its inputs."""
    if ":" not in target and not target.endswith(".py"):
        if target not in PRESETS:
            raise InputError(
                f"{target!r} is neither MODULE:FACTORY, e.g. models.py:build, nor one of "
                f"{', '.join(PRESETS)}."
            )
        if shape is not None:
            raise InputError(f"{target} makes its own input; give --tokens in place of --input.")
        decoder = Decoder(PRESETS[target], device="meta", dtype=dtype)
        return decoder, ()
    name, _, attribute = target.rpartition(":")
    if not name or not attribute:
        raise InputError(f"{target!r} is not of the form MODULE:FACTORY, e.g. models.py:build.")
    is_path = name.endswith(".py")
    with _importable(Path(name).resolve().parent if is_path else Path.cwd()):
        module = _module_at(Path(name)) if is_path else _module_named(name)
        factory = getattr(module, attribute, None)
        if factory is None:
            raise InputError(f"{name} has no {attribute!r}. Name a function or class of it.")
        if not callable(factory):
            raise InputTypeError(
                f"{target} is of type {type(factory).__name__}; it is called to make the model."
            )
        try:
            result = factory()
        except FuserError:
            raise
        except Exception as error:
            raise InputError(f"{target} raised {type(error).__name__}: {error}") from error
    return _model_and_inputs(target, result)


def _model_and_inputs(target: str, result: Any) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    model, *inputs = result if isinstance(result, tuple) and result else (result,)
    is_module = isinstance(model, torch.nn.Module)
    if not is_module or not all(isinstance(x, torch.Tensor) for x in inputs):
        parts = ", ".join(type(part).__name__ for part in (model, *inputs))
        raise InputTypeError(
            f"{target} returned {parts}; it returns a module, or a tuple of one and its input "
            "tensors."
        )
    return model, tuple(inputs)


def _module_named(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise InputError(
                f"There is no module {error.name!r}; {name} is not found."
                " Run from the folder that has it, or install it."
            ) from error
        raise InputError(f"Importing {name} raised {type(error).__name__}: {error}") from error
    except Exception as error:
        raise InputError(f"Importing {name} raised {type(error).__name__}: {error}") from error


def _module_at(path: Path) -> ModuleType:
    """The module in the file ``path``."""
    if not path.is_file():
        raise InputError(f"There is no file {str(path)!r}. Give its path from this folder.")
    # Not the plain stem: a loaded module may have the same name as the file.
    spec = importlib.util.spec_from_file_location(f"fuser_loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look up a class's module by its name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"Importing {path} raised {type(error).__name__}: {error}") from error
    return module


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Make modules of ``folder`` importable, as python does for the script that it runs."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _default_shape(model: torch.nn.Module, rows: int) -> tuple[int, ...]:
    """``rows`` rows of the input size of the first module that has one."""
    for module in model.modules():
        size = next(
            (
                getattr(module, name)
                for name in ("in_features", "normalized_shape", "size")
                if hasattr(module, name)
            ),
            None,
        )
        if isinstance(size, int):
            return (rows, size)
        if size is not None:
            return (rows, *size)
    raise InputError(
        f"No op of the model tells the size of its input; give the shape, e.g. --input {rows}x1024."
    )


def _dtype_of(model: torch.nn.Module) -> torch.dtype:
    """The dtype of the model's first floating-point parameter, or torch's default."""
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(dtypes, torch.get_default_dtype())


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise InputError(f"--input is {text!r}; a shape is positive sizes with x between, 16x128.")
    return tuple(map(int, sizes))


def _tokens(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--tokens is {text!r}; it is the number of rows, 1 or more.")
    return int(text)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise InputError(f"--dtype is {name!r}; it is one of {', '.join(DTYPES)}.")
    return DTYPES[name]


if __name__ == "__main__":
    # torch's threads are to sleep while they wait, and not to spin: if other programs use the
    # cores, a step of the demo is then many times faster. torch reads this when it is loaded.
    if sys.argv[1:2] == ["demo"] and os.name == "posix" and "OMP_WAIT_POLICY" not in os.environ:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "OMP_WAIT_POLICY": "passive"})
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # who reads it, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    raise SystemExit(status)
