"""Pipelines at run time: call keys, generated code, the autograd node, checks."""
