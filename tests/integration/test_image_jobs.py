"""The quickstart as jobs in the image of ``docker/Dockerfile.cpu``, as a cluster with pyxis and enroot runs it: real
daemons of Slurm on this machine, and the stand-in for pyxis of ``tests/fixtures/pyxis``. ``make image-jobs``.

A job is a user's who is not root, and to whom nothing in the image belongs; its root is read-only. Steps find a
``mopd`` in the image alone. vLLM is none of the image's packages: a teacher has it from another interpreter there,
whose packages are mounted. Left out: unpacking an image, GPUs, and that a node has its own processes and files.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures import slurm
from tests.integration.jobs import ended, job_id, job_logs, num_steps, replica_pids, until
from tests.integration.world import REPOSITORY, environment

IMAGE = os.environ.get("MOPD_IMAGE", "")
UID = 1000
"""The jobs' user; the image knows one of this number."""
AS_USER = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups")
AS_USER += ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
"""What makes a command the user's, and lets it read a Python in root's folders; the jobs have no such right."""
VLLM = Path("/opt/vllm")
PACKAGES = VLLM / "lib" / "python3.11" / "site-packages"
STEPS = 5
pytestmark = [
    pytest.mark.slow,
    pytest.mark.multirank,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not IMAGE, reason="wants an image: make image-cpu image-jobs"),
    pytest.mark.skipif(bool(slurm.why_not()), reason=slurm.why_not() or "Slurm is there"),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the packages of this Python are none of the image's"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster with pyxis, and a folder of the jobs' user that all nodes see."""

    cluster: slurm.Cluster
    folder: Path
    image: Path
    """The unpacked image, as nodes see it."""
    variables: dict[str, str]

    def submit(self, name: str, recipe: dict[str, Any], **section: Any) -> subprocess.Popen[str]:
        """``mopd slurm --wait`` of a recipe whose run folder is ``runs/NAME``, by the jobs' user."""
        mounts = [f"{sysconfig.get_path('purelib')}:{PACKAGES}:ro"]
        container = {"type": "pyxis", "image": str(self.image), "mounts": mounts}
        tree = {
            "run_dir": f"runs/{name}",
            **recipe,
            "slurm": {"gpus_per_node": 0, "time": "20", "container": container, **section},
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return subprocess.Popen(
            [*AS_USER, sys.executable, "-m", "mopd", "slurm", path.name, "--wait"],
            cwd=self.folder,
            env=environment() | self.cluster.environment | self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run_dir(self, name: str) -> Path:
        return self.folder / "runs" / name


def buildah(*arguments: str) -> str:
    """What buildah prints."""
    return subprocess.run(["buildah", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@pytest.fixture(scope="module")
def unpacked() -> Iterator[Path]:
    """The image's files, with an environment for vLLM that has no packages yet, and a library that vLLM wants."""
    container = buildah("from", IMAGE)
    try:
        root = Path(buildah("mount", container))
        subprocess.run(["chroot", root, "python3", "-m", "venv", "--without-pip", VLLM], check=True)
        for library in Path("/usr/lib").glob("*/libnuma.so.1"):
            shutil.copy(library, root / library.relative_to("/"))
        yield root
    finally:
        buildah("rm", container)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's models and data, made here if they are not there."""
    made = REPOSITORY / "runs" / "quickstart_assets"
    if not (made / "manifest.json").is_file():
        made = tmp_path_factory.mktemp("assets")
        command = [sys.executable, REPOSITORY / "tools" / "make_quickstart.py", "--out", made]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return made


@pytest.fixture(scope="module")
def site(unpacked: Path, assets: Path) -> Iterator[Site]:
    try:
        pwd.getpwuid(UID)
    except KeyError:
        pytest.skip(f"Slurm wants a user of number {UID}: useradd --uid {UID}")
    listed = '{{range .OCIv1.Config.Env}}{{.}}{{"\\n"}}{{end}}'
    variables = buildah("inspect", "--type=image", f"--format={listed}", IMAGE).splitlines()
    own = dict(variable.split("=", 1) for variable in variables)
    with tempfile.TemporaryDirectory(prefix="mopd-jobs-") as name:
        top = Path(name)
        for part in ("bin", "image", "jobs", "jobs/runs"):
            (top / part).mkdir()
        shutil.copy(Path(__file__).parents[1] / "fixtures" / "pyxis" / "srun", top / "bin")
        shutil.copytree(assets, top / "jobs" / "runs" / "quickstart_assets")
        for path in (top / "jobs", *(top / "jobs").rglob("*")):
            os.chown(path, UID, UID)
        top.chmod(0o755)
        bind = f'mount --bind {unpacked} {top}/image && exec "$@"'  # its own place is root's alone
        with slurm.running(top / "slurm", prefix=["unshare", "--mount", "sh", "-c", bind, "sh"]) as cluster:
            path = f"{top}/bin:{os.environ['PATH']}"
            passed = {"PATH": path, "IMAGE_PATH": own["PATH"], "IMAGE_HOME": own["HOME"], "IMAGE_UID": str(UID)}
            yield Site(cluster=cluster, folder=top / "jobs", image=top / "image", variables=passed)


@pytest.fixture
def nodes(site: Site) -> Iterator[Site]:
    """The site, for one test's jobs."""
    yield site
    site.cluster.clear()


def quickstart(*, steps: int = STEPS, ranks: int = 2, placement: dict[str, Any] | None = None) -> dict[str, Any]:
    """The quickstart with few steps; ``placement`` of teachers and rollout, else all are in rank 0's process."""
    engine = {"type": "torch", "dtype": "float32"}
    group = {"engine": engine, "placement": placement} if placement is not None else {}
    return {
        "base": str(REPOSITORY / "recipes" / "quickstart.yaml"),
        "student": {"parallel": {"tensor_model_parallel_size": ranks}, "optimizer": {"lr_warmup_steps": 1}},
        "schedule": {"steps": steps, "prompts_per_step": 24, "wait_timeout_s": 600},
        "checkpoint": {"every_steps": steps},
        "validation": None,
        **({"teacher_defaults": group, "rollout": group} if group else {}),
    }


def with_vllm(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with one teacher on vLLM, whose interpreter is not the trainer's."""
    engine = {"type": "vllm", "dtype": "float32", "kv_cache_memory_bytes": 2**26, "enforce_eager": True}
    placement = {**recipe["teacher_defaults"]["placement"], "python": str(VLLM / "bin" / "python")}
    return {**recipe, "teachers": {"reversal": {"engine": engine, "placement": placement}}}


def assert_done(process: subprocess.Popen[str], run_dir: Path, *, code: int = 0) -> str:
    """The job has ended as it should, and nothing that it wrote is another user's; what it printed."""
    exit_code, output, errors = ended(process, timeout_s=900)
    assert exit_code == code, output + errors + job_logs(run_dir)
    assert {path.stat().st_uid for path in run_dir.rglob("*")} == {UID}
    return output


def test_a_plain_job_trains_on_two_nodes(nodes: Site) -> None:
    run_dir = nodes.run_dir("plain")
    recipe = quickstart()
    recipe["student"]["parallel"]["data_parallel_size"] = 2
    assert_done(nodes.submit("plain", recipe, nodes=2, student_nodes=2), run_dir)
    assert num_steps(run_dir) == STEPS and (run_dir / "logs" / "node2" / "rank_2.log").is_file()


def test_teachers_are_components_of_a_heterogeneous_job(nodes: Site, unpacked: Path) -> None:
    """One of them is vLLM's, which only another interpreter than the trainer's has."""
    assert list(unpacked.glob("opt/venv/lib/*/site-packages/torch")) and not list(
        unpacked.glob("opt/venv/lib/*/site-packages/vllm")
    )
    run_dir = nodes.run_dir("heterogeneous")
    recipe = with_vllm(quickstart(placement={"type": "registered", "startup_timeout_s": 600.0}) | {"rollout": {}})
    eager = ["export TORCHDYNAMO_DISABLE=1"]  # the image has no compiler, which vLLM's scores on a CPU want
    assert_done(nodes.submit("heterogeneous", recipe, form="heterogeneous", partition="wide", setup=eager), run_dir)
    assert num_steps(run_dir) == STEPS
    logs = {path.name: path.parent.name for path in run_dir.glob("logs/node?/teachers.*.log")}
    assert set(logs.values()) == {"node2", "node3", "node4"} and len(logs) == 3


def test_a_model_that_no_container_sees_ends_the_job_with_2(nodes: Site, assets: Path) -> None:
    """The nodes have the folder, and ``slurm.container.mounts`` does not name it."""
    recipe = quickstart()
    hidden = nodes.folder.with_name("hidden")
    shutil.copytree(assets / "base", hidden)
    recipe["student"]["model"] = str(hidden)
    process = nodes.submit("unseen", recipe, nodes=2, student_nodes=2)
    output = assert_done(process, nodes.run_dir("unseen"), code=2)
    assert f"student.model: folder {str(hidden)!r} does not exist" in output + job_logs(nodes.run_dir("unseen"))


def test_a_replica_that_dies_goes_on_and_then_ends_the_job_with_69(nodes: Site) -> None:
    """All groups register. A teacher is killed three times: twice where it was, then on the spare node; with the fourth
    time it is lost."""
    run_dir = nodes.run_dir("killed")
    recipe = quickstart(steps=100_000, ranks=1, placement={"type": "registered", "startup_timeout_s": 60.0})
    process = nodes.submit("killed", recipe, nodes=2, spare_nodes=1, student_nodes=1)
    key, homes = "teachers.sorting", list[str]()
    for _ in range(4):
        before = num_steps(run_dir)
        until(lambda before=before: num_steps(run_dir) > before + 1, timeout_s=300)  # type: ignore[misc]
        ((home, pid),) = replica_pids(run_dir, key).items()
        homes.append(home)
        os.kill(pid, signal.SIGKILL)
        for file in (run_dir / "replicas").glob(f"{key}.*.json"):
            file.unlink()
    assert homes == ["node1", "node1", "node2", "node2"], job_logs(run_dir)
    until(lambda: "exit code 69: back into the queue" in job_logs(run_dir), timeout_s=300)
    nodes.cluster.run("scancel", job_id(run_dir))
    ended(process)


def test_a_lost_node_costs_a_spare_one_and_a_stop_ends_the_job_with_75(nodes: Site) -> None:
    run_dir = nodes.run_dir("lost")
    recipe = quickstart(steps=100_000, ranks=1, placement={"type": "registered"}) | {"rollout": {}}
    process = nodes.submit("lost", recipe, partition="wide", nodes=3, spare_nodes=1, gpus_per_node=2)
    until(lambda: num_steps(run_dir) > 1, timeout_s=300)
    nodes.cluster.stop_node("node2")
    nodes.cluster.kill_steps("node2")
    lost = [path.name for path in run_dir.glob("logs/node2/teachers.*.log")]
    until(lambda: all((run_dir / "logs" / "node3" / name).is_file() for name in lost), timeout_s=300)
    before = num_steps(run_dir)
    until(lambda: num_steps(run_dir) > before + 1, timeout_s=300)
    subprocess.run([*AS_USER, sys.executable, "-m", "mopd", "stop", run_dir], env=environment(), check=True)
    assert_done(process, run_dir, code=75)
    nodes.cluster.start_node("node2")
    assert lost
