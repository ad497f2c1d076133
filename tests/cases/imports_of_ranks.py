"""Imported by the process that ranks are forked from: what they would each import for seconds.

Nothing here may start a thread, which no fork has, or a GPU, which no fork can use.
"""

from __future__ import annotations

import garbage
import networkx  # noqa: F401
import numpy  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo
from unmeasured_guards import leave_guards_unmeasured

import fuser  # noqa: F401

if torch.distributed.is_available():
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.nn.parallel

leave_guards_unmeasured()
garbage.look_for_garbage()
