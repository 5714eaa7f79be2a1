"""Draft trees: builders that turn marginals into a tree, and the geometry that follows from it."""
