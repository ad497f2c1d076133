"""Products are beside the library: it loads none by itself, and runs where one was deleted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rooms import LIBRARY, room_of

STEP = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # cannot be imported
import torch
import fuser
torch.manual_seed(0)
class Twice(fuser.BasicOperation):
    def op_forward(
        self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer
    ):
        seen.append(next_op_input_quantizer)
        return 2 * input_
    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()
seen = []
def trained(*ops):
    block = fuser.Sequential(fuser.LayerNorm(32), *ops, fuser.Linear(32, 32))
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    losses, x = [], torch.randn(32, 32)
    for _ in range(2):
        optimizer.zero_grad()
        with fuser.autocast(recipe=fuser.recipe.Float8CurrentScaling()):
            loss = block(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
losses = trained(fuser.Linear(32, 64), fuser.SwiGLU())
loaded = [m.__file__ for n, m in sys.modules.items() if n.startswith("fuser") and m]
losses += trained(Twice())
is_changeable = hasattr(seen[0], "set_usage")
print(json.dumps([losses, loaded, is_changeable, bool(sys.modules.get("fuser.te"))]))
"""


def step(*deleted: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(LIBRARY.parent)}
    command = [sys.executable, "-c", STEP, *deleted]
    return json.loads(subprocess.check_output(command, env=environment, text=True))


@pytest.fixture(scope="module")
def here() -> Any:
    return step()


def test_a_block_trains_without_a_product(here: Any) -> None:
    losses, loaded, *_ = here
    assert losses[0] > losses[1] > 0
    files = [Path(file).relative_to(LIBRARY).as_posix() for file in loaded]
    assert len(files) > 50
    assert [file for file in files if room_of(file).kind == "product"] == []


def test_without_te_losses_are_the_same_and_users_ops_see_quantizers_that_are_frozen(
    here: Any,
) -> None:
    losses, _, *view = step("fuser.te", "fuser.ops")
    assert (here[2:], view) == ([True, True], [False, False])
    assert losses == pytest.approx(here[0], rel=1e-3)
