#!/usr/bin/env bash
# Build docker/Dockerfile.cpu and try the image as its user: mopd --help, and five steps of the quickstart. Prints time
# and size. From the environment (docker/README.md has examples):
#   IMAGE_BUILDER     docker, podman or buildah; the first of them that works here
#   IMAGE_TAG         mopd:cpu
#   IMAGE_BUILD_ARGS  further arguments of the build: --build-arg EXTRAS=dev,ray, --volume ...
#   PIP_CONF          a pip.conf that reaches packages; given to the build as a secret
set -euo pipefail
cd "$(dirname "$0")/.."
builder=${IMAGE_BUILDER:-}
for candidate in docker podman buildah; do
  # A docker without its daemon is none.
  if [ -z "$builder" ] && "$candidate" info >/dev/null 2>&1; then builder=$candidate; fi
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

# Models of an earlier quickstart save their making, in a copy that the image's user may read.
assets=runs/quickstart_assets
scratch=$(mktemp -d)
volumes=()
container=
clean() {
  rm -rf "$scratch"
  if [ -n "$container" ]; then buildah rm "$container" >/dev/null; fi
}
trap clean EXIT
if [ -f "$assets/manifest.json" ]; then
  cp -R "$assets/." "$scratch"
  chmod -R a+rX "$scratch"
  volumes=(--volume "$scratch:/opt/mopd/$assets:ro")
fi
if [ "$builder" = buildah ]; then
  container=$(buildah from "$tag")
  inside() { buildah run --user 1000:1000 "${volumes[@]}" "$container" -- "$@"; }
else
  inside() { "$builder" run --rm --user 1000:1000 "${volumes[@]}" "$tag" "$@"; }
fi
[ "$(inside id -u)" = 1000 ]
inside mopd --help | grep -q 'exit codes'
inside python docker/healthcheck.py
five="{ [ -f $assets/manifest.json ] || python tools/make_quickstart.py >/dev/null; } && \
  mopd train recipes/quickstart.yaml run_dir=/tmp/five schedule.steps=5 student.optimizer.lr_warmup_steps=1 \
  validation=null && wc --lines /tmp/five/metrics.jsonl"
inside bash -c "$five"
echo "$tag: built in $built s by $builder, $("$builder" images --format '{{.Size}}' "$tag"), tried in $((SECONDS - started - built)) s"
