"""Checks and times on a GPU, one section at a time: run it as `python benchmarks/gpu`."""
