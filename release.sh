#!/usr/bin/env bash
# Builds the source archive and the wheel into dist/ and tries the wheel in an environment of its own, away from the source.
#
#   ./release.sh            what a release of this version would be
#   ./release.sh v0.1.0     the same, if that tag names this version; .github/workflows/release.yml publishes what it leaves
set -euo pipefail
cd "$(dirname "$0")"
. ./setup_env.sh

version="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/sparring/__init__.py)"
[ "${1:-v$version}" = "v$version" ] \
  || fail "the tag is $1, but src/sparring/__init__.py has version $version; expected v$version"
python="$(find_python)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

say "building sparring $version"
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet --disable-pip-version-check build twine
rm -rf dist
"$work/tools/bin/python" -m build --outdir dist .
"$work/tools/bin/python" -m twine check --strict dist/*

install_into "$python" "$work/clean" "dist/sparring-$version-py3-none-any.whl"
say "trying the wheel"
cd "$work"
for words in --help tasks "train finetune --num_episodes 100 --output run" "report run"; do
  # shellcheck disable=SC2086
  clean/bin/sparring $words > told || { cat told; fail "\`sparring $words\` does not work from the wheel"; }
done
say "dist/ has sparring $version"
