"""Plans of a GPU on a CPU without kernels: torch computes the result of each launch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fuser.cuda import launch
from fuser.doors import PassRunner
from fuser.errors import KernelUnavailable
from fuser.runtime.recorded import RecordedPasses, RecordingPasses


class OnTorch(launch.LaunchBackend):
    """Plans are those of a GPU; each launch is refused, and torch computes its result."""

    device_type = "cpu"

    def refusal(self) -> None:
        return None

    def multiprocessors(self, device: torch.device) -> int:
        return 4

    def shared_bytes(self, device: torch.device) -> int:
        return 227 * 1024

    def has_wgmma(self, device: torch.device) -> bool:
        return False

    def run(self, kernel: Any, shape: Any, args: Any) -> None:
        recorder = getattr(launch.recording.listener, "__self__", None)
        if recorder is not None:
            recorder.sequence.actions.pop()  # it does not happen
        raise KernelUnavailable("torch computes this")


def patched(patch: pytest.MonkeyPatch, function: Any, other: Any) -> None:
    """Replace a function in every module of the library that has it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fuser":
            for key, value in list(vars(module).items()):
                if value is function:
                    patch.setattr(module, key, other)


def use_torch(patch: pytest.MonkeyPatch) -> None:
    """Run all ops so."""
    patch.setattr(launch, "backend", OnTorch())
    patched(patch, launch.kernels_support, lambda tensor: False)


@contextlib.contextmanager
def without_recordings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedPasses, "find", lambda self, *_: None)
        for name in ("constant_launches", "repeated_launches"):
            patch.setattr(RecordingPasses, name, staticmethod(getattr(PassRunner, name)))
        yield
