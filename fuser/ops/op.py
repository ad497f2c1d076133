"""The base classes of ops, as in ``te.ops.op``."""

from fuser.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext

__all__ = ["BasicOperation", "FusedOperation", "FusibleOperation", "OperationContext"]
