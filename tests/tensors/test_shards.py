"""What a shard of a quantized parameter knows, without ranks."""

from __future__ import annotations

import copy

from fuser.tensors.sharding import Sharding


def test_a_copy_of_a_shard_has_reads_of_its_own() -> None:
    """A backward of the copy does not say what that of the original reads."""
    original = Sharding(None, 4, True, backward_reads={"columnwise"})
    again = copy.deepcopy(original)
    assert (again.rows, again.is_exact, again.ranks) == (4, True, 1)
    assert again.backward_reads == set()
    again.backward_reads.add("rowwise")
    assert original.backward_reads == {"columnwise"}
