"""Prints pyproject.toml's lower bounds as pip's constraints: what make test-lowest installs.

torch alone is left at what pip takes: its older builds for Linux bring gigabytes of CUDA.
With --for-runs, as pip's requirements, without what only exports, charts and browsers need.
"""

import re
import sys
import tomllib
from pathlib import Path

NOT_FOR_RUNS = ("accelerate", "optimum-onnx", "transformers", "vl-convert-python", "playwright")

settings = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
wanted = [
    *settings["project"]["dependencies"],
    *settings["project"]["optional-dependencies"]["export"],
    *settings["project"]["optional-dependencies"]["report"],
    *settings["dependency-groups"]["test"],
]
left_out = ("torch", *(NOT_FOR_RUNS if sys.argv[1:] == ["--for-runs"] else ()))
for requirement in wanted:
    found = re.match(r"([\w.-]+)(?:\[.*\])?(?:>=|==)([\w.]+)", requirement)
    if found is None:
        raise SystemExit(f"{requirement} has no lower bound")
    name, version = found.groups()
    if name not in left_out:
        print(f"{name}=={version}")
