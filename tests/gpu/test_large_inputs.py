"""Quantizers of more than 2^31 elements: the last rows are what they are alone.

An index that is computed in 32 bits would wrap there.
"""

from __future__ import annotations

import every_format as formats
import pytest
import torch

from fuser.tensors import Float8BlockQuantizer, Quantizer

ROWS, COLUMNS = 2**16 + 256, 2**15
LAST = 256

QUANTIZERS: dict[str, Quantizer] = {
    **formats.QUANTIZERS,
    "1x128": Float8BlockQuantizer(block_scaling_dim=1),
}


@pytest.mark.parametrize("copy", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_last_of_more_than_two_to_the_31_elements_are_what_they_are_alone(
    name: str, copy: str
) -> None:
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    assert ROWS * COLUMNS > 2**31
    x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    x.clamp_(-4, 4)[-1, -1] = 8  # so that the last rows have the amax of all
    if QUANTIZERS[name].format.name == "FP8 rowwise":
        x[-1] = 8  # and of each column
    quantizer = QUANTIZERS[name].with_usage(
        rowwise=copy == "rowwise", columnwise=copy == "columnwise"
    )
    alone = quantizer(x[-LAST:].clone()).dequantize()
    assert torch.equal(quantizer(x).dequantize()[-LAST:], alone)
    assert alone.float().sub(x[-LAST:].float()).abs().mean() < 0.1
