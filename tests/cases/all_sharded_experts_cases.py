"""All cases of experts under ``fully_shard`` (FSDP2) on two ranks."""

from __future__ import annotations

import sharded_experts_cases
import sharded_quantized_experts_cases
import sharded_stacked_experts_cases

CASES = {
    **sharded_experts_cases.CASES,
    **sharded_quantized_experts_cases.CASES,
    **sharded_stacked_experts_cases.CASES,
}
