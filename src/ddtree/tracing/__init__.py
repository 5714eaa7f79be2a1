"""Rounds written down, replayed with other trees, and drawn as a timeline."""
