"""The demo: a small language model of fuser pipelines, trained on Python's own source."""
