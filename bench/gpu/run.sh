#!/usr/bin/env bash
# All that is to be known of lowbit on a machine with an NVIDIA GPU, in a few minutes and without a network:
#
#   bench/gpu/run.sh FOLDER [--wheels FOLDER] [--simulate] [--only PART]... [--limit SECONDS] [--total SECONDS]
#
# writes FOLDER/machine.json, FOLDER/PART.json for each part, and FOLDER/summary.json. All parts together end within
# nine minutes (--total 540). It needs Python 3.11 or later
# (PYTHON names another than python3) and a driver. lowbit need not be installed: its files are used where they lie.
# What it depends on, and NVIDIA's packages, are taken from wheels carried along, or from what is installed; on a
# machine with a network, this fetches them:
#
#   pip download --only-binary=:all: -d FOLDER --python-version 3.12 --platform manylinux_2_28_x86_64 \
#     --platform manylinux2014_x86_64 gguf numpy platformdirs rich safetensors tokenizers typer jinja2 pytest \
#     "cuda-core>=1.2,<2,!=1.3.0" "cuda-bindings>=13,<14" "nvidia-cuda-nvrtc>=13,<14"
#
# They have 100 MB, of which 58 are nvidia-cuda-nvrtc. Where the machine has CUDA's toolkit or PyTorch for CUDA 13, that
# wheel and those of packages that are there can stay behind: wheels go before what is installed.
#
# --simulate runs the same on a simulated device, to try the script; its JSON says so, and none of it is a measurement.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}

arguments=() wheels=""
while (($#)); do
  case $1 in
    --wheels) wheels=${2:?--wheels needs a folder}; shift 2 ;;
    --wheels=*) wheels=${1#*=}; shift ;;
    *) arguments+=("$1"); shift ;;
  esac
done

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [[ -n $wheels ]]; then
  "$python" -P -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
fi
export PYTHONPATH="$root/spec:$root/backends:$root/conformance:$root/conformance/selftest/support:$root/bench:$site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONDONTWRITEBYTECODE=1
for libraries in "$site"/nvidia/*/lib; do  # NVIDIA's packages look for each other only where Python was installed
  export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
done
export LOWBIT_CACHE="${LOWBIT_CACHE:-$site/cache}"  # compiled kernels, for all parts, wherever a home may be
"$python" -P -m gpu.entry_points "$site"
"$python" -P -m gpu.measure "${arguments[@]}"
