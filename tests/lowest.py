"""Prints pyproject.toml's lower bounds as pip's constraints: what make test-lowest installs.

torch alone is left at what pip takes: its older builds for Linux bring gigabytes of CUDA.
With --without-torch all that can be installed without it, as pip's requirements.
"""

import re
import sys
import tomllib
from pathlib import Path

STAND_ON_TORCH = ("accelerate", "optimum-onnx", "transformers")

settings = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
wanted = [
    *settings["project"]["dependencies"],
    *settings["project"]["optional-dependencies"]["export"],
    *settings["project"]["optional-dependencies"]["report"],
    *settings["dependency-groups"]["test"],
]
left_out = ("torch", *(STAND_ON_TORCH if sys.argv[1:] == ["--without-torch"] else ()))
for requirement in wanted:
    found = re.match(r"([\w.-]+)(?:\[.*\])?(?:>=|==)([\w.]+)", requirement)
    if found is None:
        raise SystemExit(f"{requirement} has no lower bound")
    name, version = found.groups()
    if name not in left_out:
        print(f"{name}=={version}")
