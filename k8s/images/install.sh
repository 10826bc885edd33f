#!/bin/sh
# install.sh EXTRA VENV
#
# Install this checkout with one extra (cli, server or vllm-server) into a virtual environment without pip. Every
# package must have a hash that requirements/ lists, and so must what builds our two. TORCH says which
# torch a server gets: cuda, or cpu from an index that has it. PIP_ARGS is passed on, for an index.
set -eu
cd "$(dirname "$0")/../.."
lists=k8s/images/requirements
work=$(mktemp -d)

install() { # VENV WHAT...
  venv=$1
  shift
  # shellcheck disable=SC2086  # several words
  python3 -m pip --python "$venv/bin/python" install \
    --quiet --no-cache-dir --disable-pip-version-check --root-user-action ignore \
    ${PIP_ARGS:-} "$@"
}

cp "$lists/orchestrator.txt" "$work/requirements.txt"
if [ "$1" = server ]; then
  cat "$lists/server.txt" "$lists/torch-${TORCH:-cuda}.txt" >>"$work/requirements.txt"
elif [ "$1" = vllm-server ]; then
  cat "$lists/vllm.txt" >>"$work/requirements.txt"
fi
python3 -m venv --without-pip "$2"
install "$2" --require-hashes --requirement "$work/requirements.txt"

python3 -m venv --without-pip "$work/builder"
install "$work/builder" --require-hashes --requirement "$lists/build.txt"
for project in clients/python .; do
  (cd "$project" && "$work/builder/bin/python" -m hatchling build --target wheel --directory "$work/wheel")
done
install "$2" --no-deps "$work"/wheel/*.whl

rm -rf "$work"
python3 -m pip --python "$2/bin/python" check
