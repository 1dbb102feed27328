#!/usr/bin/env bash
# Installs the object store emulators, each in an environment of its own: their dependencies are
# older than Beam's. Does nothing where they are installed already.
# Arguments: which of them, gcs s3; none: all.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
wanted=" ${*:-gcs s3} "

install() {  # folder, requirements...
  local folder=".venv/services/$1"
  shift
  if [[ "$wanted" == *" ${folder##*/} "* && ! -e "$folder/.installed" ]]; then
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet "$@"
    touch "$folder/.installed"
  fi
}

# Its dependency fs 2.4 imports pkg_resources, which newer setuptools have no more.
install gcs "gcp-storage-emulator==2024.8.3" "setuptools<81"
install s3 "moto[server]>=5,<6"
