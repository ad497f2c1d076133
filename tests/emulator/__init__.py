"""CUDA kernels on a machine without a GPU: the same sources, compiled by g++ and run on the CPU.

Inside ``with emulated():`` a launcher takes CPU tensors, and its kernels run here::

    y = torch.empty_like(x)
    with emulated(written=(y,)):
        probe(x, y, 2.0)

What a kernel does wrong is a :class:`KernelError` with the kernel's name, the place in its source
and the thread: see :func:`emulated` for what is found.
"""

from emulator.backend import emulated, prepare
from emulator.compile import why_unavailable
from emulator.errors import KernelError

__all__ = ["KernelError", "emulated", "prepare", "why_unavailable"]
