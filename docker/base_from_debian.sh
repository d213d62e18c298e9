#!/usr/bin/env bash
# For machines that reach Debian's packages but no registry of images: makes what Dockerfile.cpu begins FROM out of
# Debian 12, whose Python is 3.11 too, and gives it that name in buildah's storage. Needs root, debootstrap and buildah.
#   docker/base_from_debian.sh [MIRROR]
set -euo pipefail
cd "$(dirname "$0")"
name=$(sed -n 's/^FROM //p' Dockerfile.cpu)
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3-venv,python-is-python3 bookworm "$root" ${1:+"$1"}
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
container=$(buildah from scratch)
buildah copy --quiet "$container" "$root" /
buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
buildah commit --quiet --rm "$container" "$name"
