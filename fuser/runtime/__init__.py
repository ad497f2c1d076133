"""Pipelines at run time: call keys, plans written out as code, the autograd node, checks."""
