"""Draft trees in vLLM: an out-of-tree plugin on the same tree core.

Modules that import vllm are `runner`, `proposer`, `cpu`, `cuda`, `plugin` and `metrics`; everything
else needs torch alone and is tested without an engine. docs/serving.md says how to use it.
"""
