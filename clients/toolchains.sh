#!/usr/bin/env bash
# What the clients are built with, from Debian.
#   clients/toolchains.sh [LANGUAGE...]    install it, as root; without a language: for all of them
#   clients/toolchains.sh has LANGUAGE     say what is missing: exit 3, or 1 with CLIENT_TOOLCHAINS=required
set -euo pipefail

packages() {
  case "$1" in
    typescript) echo nodejs npm ;;
    go) echo golang-go golang-google-grpc-dev golang-google-genproto-dev golang-google-protobuf-dev \
      golang-github-golang-protobuf-1-5-dev protobuf-compiler protoc-gen-go protoc-gen-go-grpc gcc libc6-dev ;;
    cpp) echo g++ cmake pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc \
      nlohmann-json3-dev libgtest-dev ;;
    ruby) echo ruby ruby-grpc ruby-grpc-tools ;;
    *) echo "there is no language $1" >&2 && return 2 ;;
  esac
}

has() {
  case "$1" in
    typescript) npm --version && node --eval \
      'const [major, minor] = process.versions.node.split(".").map(Number); process.exit(major > 20 || (major === 20 && minor >= 9) ? 0 : 1)' ;;
    go) type -P go protoc protoc-gen-go protoc-gen-go-grpc && test -d /usr/share/gocode/src/google.golang.org/grpc ;;
    cpp) type -P g++ cmake protoc grpc_cpp_plugin && pkg-config --exists grpc++ protobuf gtest nlohmann_json ;;
    ruby) type -P grpc_tools_ruby_protoc && ruby -e 'require "grpc"' ;;
  esac &>/dev/null
}

if [ "${1:-}" = has ]; then
  wanted=$(packages "${2:?which language}")
  has "$2" && exit
  test "$2" != typescript || wanted="$wanted (20.9 or later)"
  if [ "${CLIENT_TOOLCHAINS:-}" = required ]; then what=failed code=1; else what=skipped code=3; fi
  echo "$what: $2 needs $wanted; clients/toolchains.sh $2 installs that, as root" >&2
  exit "$code"
fi

[ $# -gt 0 ] || set -- typescript go cpp ruby
wanted=()
for language in "$@"; do
  needed=$(packages "$language")
  has "$language" || wanted+=("$needed")
done
[ "${#wanted[@]}" -gt 0 ] || exit 0
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
xargs apt-get install -y -qq --no-install-recommends <<<"${wanted[*]}"
