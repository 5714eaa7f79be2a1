"""Targets and drafters: where they come from and how their checkpoints are read."""
