#!/usr/bin/env bash
# Builds, checks and times the kernels on the GPU of this machine against device-to-device copy, in under three minutes.
#   benchmarks/device_check.sh [--json FILE] [--size-mb N] [--only WORD]
# PYTHON: a Python with torch for the GPU, numpy, and triton if it is to be checked (default: .venv's, else python3).
# Exit status: 0 all right and fast enough, 1 a kernel is wrong, 2 no GPU (what a CPU can do was done), 3 slower than the
# goal.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-}
[[ -n $python ]] || { [[ -x .venv/bin/python ]] && python=.venv/bin/python || python=python3; }
"$python" -c 'import torch, numpy' 2>/dev/null \
  || { echo "$python lacks torch or numpy; set PYTHON to one that has them" >&2; exit 64; }
# Nothing of Nereus needs to be installed: kernels know nobody.
PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} exec timeout 175 "$python" -W ignore benchmarks/device_check.py "$@"
