"""Imported by the process that ranks are forked from: what they would each import for seconds.

Nothing here may start a thread, which no fork has, or a GPU, which no fork can use.
"""

from __future__ import annotations

import gc

import networkx  # noqa: F401
import numpy  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo

import fuser  # noqa: F401

if torch.distributed.is_available():
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.nn.parallel

gc.collect()
gc.freeze()  # a collection in a rank would write to, and so copy, what all ranks share
