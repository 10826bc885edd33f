#!/bin/sh
# install.sh EXTRA VENV
#
# Install this checkout with one extra into a virtual environment without pip, every dependency as
# constraints.txt has it. PIP_ARGS is passed on, for another index.
set -eu
cd "$(dirname "$0")/../.."
python3 -m venv --without-pip "$2"
# shellcheck disable=SC2086  # several words
python3 -m pip --python "$2/bin/python" install \
  --quiet --no-cache-dir --disable-pip-version-check --root-user-action ignore \
  ${PIP_ARGS:-} --constraint constraints.txt ".[$1]"
python3 -m pip --python "$2/bin/python" check
