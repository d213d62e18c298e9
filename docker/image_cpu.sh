#!/usr/bin/env bash
# Build docker/Dockerfile.cpu and try the image as its user: mopd --help, and five steps of the quickstart. Prints time
# and size. From the environment (docker/README.md has examples):
#   IMAGE_BUILDER     docker, podman or buildah; the first of them that is there
#   IMAGE_TAG         mopd:cpu
#   IMAGE_BUILD_ARGS  further arguments of the build: --build-arg EXTRAS=dev,ray, --volume ...
#   PIP_CONF          a pip.conf that reaches packages; given to the build as a secret
set -euo pipefail
cd "$(dirname "$0")/.."
builder=${IMAGE_BUILDER:-}
for candidate in docker podman buildah; do
  if [ -z "$builder" ] && command -v "$candidate" >/dev/null; then builder=$candidate; fi
done
if [ -z "$builder" ]; then
  echo "make image-cpu needs docker, podman or buildah: install one of them" >&2
  exit 2
fi
tag=${IMAGE_TAG:-mopd:cpu}
read -ra arguments <<<"${IMAGE_BUILD_ARGS:-}"
if [ -n "${PIP_CONF:-}" ]; then arguments+=(--secret "id=pip_conf,src=$PIP_CONF"); fi
# Only docker's own format has healthchecks.
if [ "$builder" != docker ]; then arguments+=(--format docker); fi
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' mopd/__init__.py)
revision=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)

started=$SECONDS
"$builder" build --file docker/Dockerfile.cpu --tag "$tag" \
  --build-arg "VERSION=$version" --build-arg "REVISION=$revision" "${arguments[@]}" .
built=$((SECONDS - started))

assets=runs/quickstart_assets
volumes=()
if [ -d "$assets" ]; then volumes=(--volume "$PWD/$assets:/opt/mopd/$assets:ro"); fi
if [ "$builder" = buildah ]; then
  container=$(buildah from "$tag")
  trap 'buildah rm "$container" >/dev/null' EXIT
  inside() { buildah run --user 1000:1000 "${volumes[@]}" "$container" -- "$@"; }
else
  inside() { "$builder" run --rm --user 1000:1000 "${volumes[@]}" "$tag" "$@"; }
fi
[ "$(inside id -u)" = 1000 ]
inside mopd --help | grep -q 'exit codes'
inside python docker/healthcheck.py
five="python tools/make_quickstart.py >/dev/null && mopd train recipes/quickstart.yaml run_dir=/tmp/five \
  schedule.steps=5 student.optimizer.lr_warmup_steps=1 validation=null && wc -l /tmp/five/metrics.jsonl"
inside bash -c "$five"
echo "$tag: built in $built s by $builder, $("$builder" images --format '{{.Size}}' "$tag"), tried in $((SECONDS - started - built)) s"
