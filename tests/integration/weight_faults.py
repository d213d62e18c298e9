"""Faults of weight updates, drawn by chance, and what a run must make of them. Proven by ``test_weight_faults.py``."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from mopd.launch.failure import STOPPED_CODE
from tests.fixtures import slurm
from tests.fixtures.networks import within
from tests.fixtures.servers import engine_file
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.integration.far_servers import FarServers
from tests.integration.ray_nodes import ray_nodes
from tests.integration.struck import GO, PHASES, Act, Fault
from tests.integration.under_fire import LOCAL, MAX_STALENESS, TOY, Run, recipe_of, role_of
from tests.integration.world import World, mopd, write_prompts

TIMEOUT_S = 4.0
"""``weight_sync.timeout_s``."""
ATOL = 1e-4
"""Of log-probs by the weights of their version: rounding; those of the neighbours err by ``POWER`` times as much."""
POWER = 10
SOME = 8
"""One step of so many, where nothing was struck."""
NUM_OTHERS = 20
NUM_REPLICAS = 3
MAX_DEATHS = 3
"""Of each replica in one life of a run that starts it: as many as there are restarts."""
FAR_S = 60.0
"""``routing.request_timeout_s`` of replicas that somebody else starts again: those away for longer are given up."""
WALL_S = TIMEOUT_S + 2.0
"""Of a firewall: longer than an attempt lasts."""
HARMLESS, FATAL = "goes on", "ends"
ADAPTERS = {"rank": 48, "alpha": 96}
"""``student.lora`` of a run whose updates bring adapters alone: several buckets of them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault: who, what, when. Victims ``a`` and ``b`` are replicas that chance names."""

    does: str
    """``kill``, ``stop_short`` and ``stop_long`` a replica (below and above the deadline); ``flip`` a bit; ``come``: a
    replica that died is back in this phase; ``forge`` an entry of the store; ``wall``, a firewall before the student
    that lasts beyond the deadline; ``kill_two``, ``kill_and_stop``, ``kill_and_flip``; ``pause_short`` and
    ``pause_long`` rank 0; ``kill_rank``, ``kill_orchestrator``, ``term``; ``kill_worker`` and ``stop_worker``, of
    vLLM."""
    phase: str
    rank: int = 0

    @property
    def outcome(self) -> str:
        """Of the run."""
        return FATAL if self.does in ("kill_rank", "kill_orchestrator", "term") else HARMLESS


ALL = [
    *(Case(does="kill", phase=phase) for phase in PHASES),
    *(Case(does="stop_short", phase=phase) for phase in ("join", "flight", "finish")),
    *(Case(does="stop_long", phase=phase) for phase in ("join", "start", "bucket", "flight", "finish")),
    *(Case(does="flip", phase=phase) for phase in ("bucket", "bucket")),
    *(Case(does="come", phase=phase) for phase in ("join", "start", "bucket", "finish", "after")),
    Case(does="forge", phase="join"),
    Case(does="kill_two", phase="flight"),
    Case(does="kill_and_stop", phase="start"),
    Case(does="kill_and_flip", phase="bucket"),
    Case(does="pause_short", phase="bucket"),
    Case(does="pause_long", phase="flight"),
    *(Case(does="kill_rank", phase=phase, rank=0) for phase in ("join", "flight", "finish")),
    *(Case(does="kill_rank", phase=phase, rank=1) for phase in ("start", "bucket")),
    Case(does="kill_orchestrator", phase="flight"),
    Case(does="term", phase="bucket"),
]
"""More than 30: ``draw`` takes some."""


WALL = Case(does="wall", phase="join")
"""Between two networks alone."""
NODES = [
    Case(does="kill", phase="flight"),
    Case(does="stop_short", phase="join"),
    Case(does="stop_long", phase="bucket"),
    Case(does="come", phase="start"),
    Case(does="forge", phase="join"),
    WALL,
    Case(does="term", phase="bucket"),
]
"""Of replicas on other nodes of a Ray or Slurm cluster."""
SAYS = {"flip": "changed on", "forge": "is not signed with this run's secret", "wall": "processes met at"}
"""What stands in the log of a run that was struck so."""
VLLM = [
    Case(does="stop_worker", phase="bucket"),
    Case(does="kill_worker", phase="flight"),
    Case(does="flip", phase="bucket"),
    Case(does="term", phase="flight"),
]
"""Of one replica of two workers."""


def draw(num: int, chance: random.Random) -> list[Case]:
    """So many, all different as long as there are."""
    cases: list[Case] = []
    while len(cases) < num:
        cases += chance.sample(ALL, len(ALL))
    return cases[:num]


def make_world(folder: Path) -> World:
    """Random models of some MiB: several buckets of the smallest size."""
    world = World(folder)
    for seed, path in enumerate((world.student, *world.teachers.values())):
        size = {"num_layers": 4, "ffn_size": 2048} if path == world.student else {}
        make_hf_model(path, "qwen3", seed=seed, scale=0.1, **size)
        make_tokenizer(path)
    write_prompts(world.train, num_rows=40, start=0)
    write_prompts(world.validation, num_rows=4, start=1000)
    return world


class StruckRun(Run):
    """A run whose updates of the weights can be struck."""

    program = "tests.integration.struck"
    most_deaths = MAX_DEATHS
    """Of each replica in one life of the run."""

    def __init__(
        self,
        world: World,
        folder: Path,
        *,
        parallel: str | None = None,
        num_replicas: int = NUM_REPLICAS,
        placement: dict[str, Any] | None = None,
        request_timeout_s: float = 20.0,
        patience: float = 1.0,
        **changes: Any,
    ) -> None:
        """``parallel``: ``tensor`` or ``pipeline``, by two ranks; ``placement`` of its replicas, by default the run's
        own; ``patience``: how much slower than torch's here they start; ``changes`` of the recipe."""
        self.start_s, self.deadline_s = patience * self.start_s, patience * self.deadline_s
        self.num_replicas = num_replicas
        rollout = {
            **TOY["rollout"],
            "max_response_length": 24,
            "placement": placement or {**LOCAL, "startup_timeout_s": 240},
            **({} if placement else {"replicas": num_replicas}),
            "routing": {"request_timeout_s": request_timeout_s},
        }
        one_teacher = {"left": {"model": str(world.teachers["left"]), "domains": ["left", "right"]}}
        options: dict[str, Any] = {
            "teachers": one_teacher,
            "rewards": {},
            "rollout": rollout,
            "student__parallel": {} if parallel is None else {f"{parallel}_model_parallel_size": 2},
            "student__optimizer": {"lr": 1e-3},
            "schedule__sync_every_steps": 1,
            "weight_sync": {"type": "collective", "bucket_mib": 1, "verify_every": 1, "timeout_s": TIMEOUT_S},
        }
        super().__init__(recipe_of(world, folder, steps=100_000, **{**options, **changes}))
        self.student = world.student
        self.has_adapters = "student__lora" in changes
        self.deaths: dict[str, int] = {}
        self.shared: set[Path] = set()
        """Files of shared memory that its processes had."""

    def start(self, *flags: str) -> None:
        """See ``Run.start``."""
        self.deaths = {}
        super().start(*flags)

    def family(self) -> dict[str, psutil.Process]:
        """See ``Run.family``; each rank by its number."""
        found = super().family()
        found.pop("rank 0", None)
        for path in self.journal.glob("rank_*.pid"):
            pid = int(path.read_text(encoding="utf-8"))
            if pid in self._seen and self._seen[pid].is_running():
                found[f"rank {path.stem.removeprefix('rank_')}"] = self._seen[pid]
        for process in self._seen.values():
            with contextlib.suppress(psutil.Error):
                _, is_worker, number = "".join(process.cmdline()).partition("Worker_TP")
                if is_worker:
                    found[f"worker {number[:1]}"] = process
        return found

    def close(self) -> None:
        """End what still runs."""
        if self.is_alive:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.temporary)

    def note_shared(self) -> None:
        """Look for ``shared`` files of the moment."""
        for process in tuple(self._seen.values()):
            with contextlib.suppress(psutil.Error, OSError):  # it has ended
                paths = {part.path for part in process.memory_maps() if part.path.startswith("/dev/shm/")}
                self.shared |= {Path(path) for path in paths if not path.endswith(" (deleted)")}


class FarRun(StruckRun):
    """One whose replicas are in another network, where somebody else starts them again."""

    most_deaths = sys.maxsize

    def __init__(self, world: World, folder: Path, networks: Sequence[str], **options: Any) -> None:
        near, far = networks
        files = [
            engine_file(world.student, "rollout", replica=number, request_timeout_s=FAR_S)
            for number in range(NUM_REPLICAS)
        ]
        self.servers = FarServers(far, folder.with_suffix(".servers"), files)
        external = {
            "type": "external",
            "urls": self.servers.urls,
            "token_file": str(self.servers.token_file),
            "startup_timeout_s": 240.0,
        }
        super().__init__(world, folder, placement=external, request_timeout_s=FAR_S, patience=2.0, **options)
        self.within = within(near)
        self.servers.wait_ready()
        self.servers.keep()

    def start(self, *flags: str) -> None:
        """See ``Run.start``."""
        self.num_restarts = self.servers.num_restarts
        super().start(*flags)

    def family(self) -> dict[str, psutil.Process]:
        """See ``Run.family``; the replicas are none of the run's own."""
        return super().family() | self.servers.living

    def is_repaired(self) -> bool:
        """Wait until a server that died answers again (true)."""
        self.num_restarts += 1
        wait_until(lambda: self.servers.num_restarts >= self.num_restarts, self.start_s, "a server is back", self)
        return True

    def close(self) -> None:
        """See ``StruckRun.close``."""
        super().close()
        self.servers.close()


class RayRun(StruckRun):
    """One whose replicas are on a Ray cluster's node in another network."""

    def __init__(self, world: World, folder: Path, networks: Sequence[str], **options: Any) -> None:
        self._stack = contextlib.ExitStack()
        address = self._stack.enter_context(ray_nodes(networks, num_cpus=NUM_REPLICAS))
        placement = {"type": "ray", "address": address, "startup_timeout_s": 240.0}
        options |= {"rollout__replicas": NUM_REPLICAS}
        super().__init__(world, folder, placement=placement, request_timeout_s=FAR_S, patience=2.0, **options)
        self.within = within(networks[0])

    def family(self) -> dict[str, psutil.Process]:
        """See ``Run.family``; replicas are children of Ray's agents, and write into the run's folder."""
        found = super().family()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it has ended
                if "serve" in process.cmdline() and Path(f"/proc/{process.pid}/fd/1").readlink().is_relative_to(
                    self.path
                ):
                    self._seen[process.pid] = process
                    found[role_of(process) or "reaper"] = process
        return found

    def close(self) -> None:
        """See ``StruckRun.close``."""
        super().close()
        self._stack.close()


class SlurmRun(StruckRun):
    """One that is a job of Slurm: the rank on a node of its own, each replica, which registers, on another, in another
    network. The job starts replicas again."""

    def __init__(self, world: World, folder: Path, networks: Sequence[str], **options: Any) -> None:
        self._stack = contextlib.ExitStack()
        self._cluster = self._stack.enter_context(slurm.running(folder.with_suffix(".slurm"), networks))
        options |= {
            "rollout__replicas": NUM_REPLICAS,
            "slurm": {"partition": "wide", "nodes": 3, "gpus_per_node": 2, "time": "60", "interface": slurm.INTERFACE},
        }
        placement = {"type": "registered", "startup_timeout_s": 240.0}
        super().__init__(world, folder, placement=placement, request_timeout_s=FAR_S, patience=2.0, **options)
        self.within = self._cluster.words_before("slurmctld")

    def command(self, *flags: str) -> list[str]:
        """Submit the job's own script, whose trainer is the ``program``; it resumes by itself."""
        assert set(flags) <= {"--resume"}, flags
        written = mopd("slurm", self.recipe, "--dry-run")
        assert written.returncode == 0, written.stderr
        text = written.stdout.replace(str(self.path / "job" / "recipe.yaml"), str(self.recipe))
        trainer = f'{sys.executable} -m {self.program} train "$recipe"'
        assert text.count('"${mopd[@]}" train "$recipe"') == 1, text
        script = self.recipe.with_suffix(".sh")
        script.write_text(text.replace('"${mopd[@]}" train "$recipe"', trainer), encoding="utf-8")
        (self.path / "logs" / "job").mkdir(parents=True, exist_ok=True)
        return ["env", f"SLURM_CONF={self._cluster.configuration}", "sbatch", "--wait", str(script)]

    @property
    def stderr(self) -> str:
        """See ``Run.stderr``: what sbatch says, and the job."""
        logs = sorted((self.path / "logs" / "job").glob("*.log"), key=lambda path: path.stat().st_mtime)
        return super().stderr + (logs[-1].read_text(encoding="utf-8") if logs else "")

    def family(self) -> dict[str, psutil.Process]:
        """See ``Run.family``; the launcher is a child of the job's script, a replica of its step's daemon."""
        found: dict[str, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended
                words, above = process.cmdline(), psutil.Process(process.ppid())
                if "serve" in words and str(self.path / "replicas") in words and above.name() == "slurmstepd":
                    found[f"rollout.{words[words.index('--replica') + 1]}"] = process
                elif words[2:3] == [self.program] and "slurm_script" in " ".join(above.cmdline()):
                    found["launcher"] = process
                    for child in process.children(recursive=True):
                        self._seen[child.pid] = child
                        found[role_of(child) or "other"] = child
        self._seen |= {process.pid: process for process in found.values()}
        return super().family() | found

    def is_repaired(self) -> bool:
        """Wait until every replica's server is one that lives (true)."""

        def is_whole() -> bool:
            files = (self.path / "replicas").glob("rollout.*.json")
            return sum(psutil.pid_exists(json.loads(file.read_text())["pid"]) for file in files) == NUM_REPLICAS

        wait_until(is_whole, self.start_s, "as many servers as replicas are registered", self)
        return True

    def close(self) -> None:
        """See ``StruckRun.close``."""
        super().close()
        self._stack.close()


def strike(run: StruckRun, case: Case, number: int, chance: random.Random) -> dict[str, Any]:
    """Let it happen in the next update, and see it through; what it took."""
    replicas = sorted(
        (f"rollout.{i}" for i in range(run.num_replicas)), key=lambda role: (run.deaths.get(role, 0), chance.random())
    )
    wait_until(lambda: {*replicas, "orchestrator"} <= run.family().keys(), run.start_s, "all replicas run", run)
    family = run.family()
    run.note_shared()
    acts, dead, pause_s = _acts(case, replicas, {role: process.pid for role, process in family.items()})
    before = run.num_steps
    if case.does == "come":  # dies between two updates, or in one
        run.kill(replicas[0])
    fault = Fault(
        number=number,
        phase=case.phase,
        bucket=chance.randrange(3),
        after_s=chance.choice((0.0, chance.uniform(0.001, 0.05))) if not _needs_bucket(case) else 0.0,
        acts=acts,
    )
    fault.write(run.journal)
    done = run.journal / f"done_{number}"
    wait_until(lambda: done.exists() or run.process.poll() is not None, run.deadline_s, f"{case} begins", run)
    began = time.monotonic()
    for role in dead:
        run.deaths[role] = run.deaths.get(role, 0) + 1
    if case.outcome == FATAL:
        told = _ends(run, case)
    else:
        for _ in dead:
            assert run.is_repaired(), run.stderr
        (run.journal / GO).touch()
        _goes_on(run, pause_s)
        assert SAYS.get(case.does, "") in run.stderr, run.stderr
        told = "; ".join(run.stderr.splitlines()[-2:])
    took_s = round(time.monotonic() - began, 1)
    return {"case": str(case), "victims": replicas[:2], "step": [before, run.num_steps], "s": took_s, "told": told}


def _needs_bucket(case: Case) -> bool:
    return "flip" in case.does or case.does in ("come", "forge", "wall")


def _acts(case: Case, replicas: list[str], pids: dict[str, int]) -> tuple[list[Act], list[str], float]:
    """What is done to whom, which replicas die, and how long somebody stands still."""
    first, second = replicas[0], replicas[-1]
    short, long = TIMEOUT_S / 2, 2 * TIMEOUT_S + 5
    kill = {role: Act(does="KILL", role=role, pid=pids.get(role, 0)) for role in pids}
    stop = Act(does="STOP", role=first, pid=pids[first], resume_after_s=short)
    match case.does:
        case "kill":
            return [kill[first]], [first], 0.0
        case "stop_short":
            return [stop], [], short
        case "stop_long":
            return [replace(stop, resume_after_s=long)], [], long
        case "kill_worker":
            return [kill["worker 1"]], [first], 0.0
        case "stop_worker":
            return [Act(does="STOP", role="worker 1", pid=pids["worker 1"], resume_after_s=short)], [], short
        case "flip":
            return [Act(does="flip")], [], 0.0
        case "forge":
            return [Act(does="forge")], [], 0.0
        case "wall":
            return [Act(does="wall", resume_after_s=WALL_S)], [], WALL_S
        case "come":
            return [Act(does="wait")], [first], 0.0
        case "kill_two":
            return [kill[first], kill[second]], [first, second], 0.0
        case "kill_and_stop":
            return [kill[second], stop], [second], short
        case "kill_and_flip":
            return [kill[second], Act(does="flip")], [second], 0.0
        case "pause_short" | "pause_long":
            pause_s = short if case.does == "pause_short" else long
            return [Act(does="STOP", role="rank 0", resume_after_s=pause_s)], [], pause_s
        case "kill_rank":
            role = f"rank {case.rank}"
            return [kill[role if role in kill else "rank 0"]], [], 0.0
        case "kill_orchestrator":
            return [kill["orchestrator"]], [], 0.0
        case "term":
            return [Act(does="TERM", role="launcher", pid=pids["launcher"])], [], 0.0
    raise AssertionError(case.does)


def _goes_on(run: StruckRun, pause_s: float) -> None:
    """Two steps more, in time, with responses of every replica, after ``pause_s``; nobody is given up."""
    time.sleep(pause_s)
    since = run.num_steps

    def goes_on() -> bool:
        assert run.process.poll() is None, f"ended with {run.process.returncode}: {run.stderr}"
        if run.num_steps < since + 2:
            return False
        whole, _, _ = (run.path / "metrics.jsonl").read_bytes().rpartition(b"\n")
        lines = [json.loads(line) for line in whole.split(b"\n")[since:]]
        names = (
            [f"rollout/samples/{i}" for i in range(run.num_replicas)] if run.num_replicas > 1 else ["rollout/samples"]
        )
        drawn = [sum(line[name] for line in lines) for name in names]
        return all(drawn)

    wait_until(goes_on, run.deadline_s, "two steps with responses of every replica", run)
    assert "is given up" not in run.stderr and "Traceback" not in run.stderr, run.stderr


def _ends(run: StruckRun, case: Case) -> str:
    code = run.end()
    if case.does == "term":
        assert code == STOPPED_CODE, run.stderr
        return run.stderr.splitlines()[-1]
    victim = "orchestrator" if case.does == "kill_orchestrator" else "rank"
    assert code == (69 if victim == "orchestrator" else 1), run.stderr
    assert victim in run.error() and signal.SIGKILL.name in run.error(), run.stderr
    return run.error()


def wait_until(condition: Any, timeout_s: float, what: str, run: Run) -> None:
    """Fails at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}\n{run.stderr}"
        time.sleep(0.05)


class Witness:
    """Computes anew what the samples of a run should have got, from the weights of the versions that they name."""

    def __init__(self, run: StruckRun) -> None:
        self._run = run
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run.student), dtype=torch.float32)
        self.num_tokens = 0
        self.worst = 0.0
        self._others: list[float] = []
        torch.set_num_threads(1)  # the run needs the processors

    def look(self, since: int) -> None:
        """At all that were trained from this step on, and at some of those before."""
        drawn = sorted((self._run.journal / "drawn").glob("*.safetensors"))  # before versions: the run goes on
        versions: dict[str, list[Path]] = {}
        for path in (self._run.journal / "versions").glob("*.safetensors"):
            versions.setdefault(path.name.split(".")[0], []).append(path)
        newest = 0
        for path in drawn:
            pid, step = path.stem.split("_")
            newest = max(newest, int(step))
            if int(step) >= since or int(step) % SOME == 0:
                self._check(pid, load_file(path), versions)
            path.unlink()
        for name, parts in versions.items():
            if int(name.split("_")[1]) < newest - 2 * MAX_STALENESS:
                for path in parts:
                    path.unlink()

    def close(self) -> None:
        """The look was sharp: with the weights of the version before, log-probs are others."""
        assert self.num_tokens and self._others
        assert sorted(self._others)[len(self._others) // 2] > POWER * ATOL, sorted(self._others)

    def _check(self, pid: str, fields: dict[str, Tensor], versions: dict[str, list[Path]]) -> None:
        num = len(fields) // 3
        tokens = [fields[f"tokens.{i}"].long() for i in range(num)]
        given = torch.cat([fields[f"rollout_logprobs.{i}"] for i in range(num)])
        named = torch.cat([fields[f"token_versions.{i}"] for i in range(num)])
        lengths = [len(fields[f"rollout_logprobs.{i}"]) for i in range(num)]
        for version in sorted(set(named.tolist())):
            name, chosen = f"{pid}_{version:06d}", named == version
            assert name in versions, f"tokens of weights {version}, which the student never had: {sorted(versions)}"
            error = (self._logprobs(versions[name], tokens, lengths) - given)[chosen].abs().max().item()
            self.worst = max(self.worst, error)
            assert error < ATOL, f"tokens of weights {version} were drawn by others: {error}"
            self.num_tokens += int(chosen.sum())
            before = versions.get(f"{pid}_{version - 1:06d}")
            if before is not None and len(self._others) < NUM_OTHERS:
                others = self._logprobs(before, tokens, lengths)
                self._others.append((others - given)[chosen].abs().max().item())

    def _beside_base(self, factors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights of ``ADAPTERS``, each by the matrices A and B that were sent for it."""
        whole = load_file(self._run.student / "model.safetensors")
        changed = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in factors}
        assert len(factors) == 2 * len(changed) > 0, sorted(factors)
        for module in changed:
            a, b = (factors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
            whole[f"{module}.weight"] = whole[f"{module}.weight"] + ADAPTERS["alpha"] / ADAPTERS["rank"] * b @ a
        return whole

    def _logprobs(self, weights: list[Path], tokens: list[Tensor], lengths: list[int]) -> Tensor:
        """[tokens of all responses]."""
        whole = {name: tensor for part in weights for name, tensor in load_file(part).items()}
        if self._run.has_adapters:
            whole = self._beside_base(whole)
        missing = self._model.load_state_dict(whole, strict=False).missing_keys
        assert missing == (["lm_head.weight"] if self._model.config.tie_word_embeddings else [])
        self._model.tie_weights()
        padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)  # on the right: no token sees it
        with torch.inference_mode():
            logprobs = self._model(padded).logits[:, :-1].log_softmax(-1)
        of_tokens = logprobs.gather(-1, padded[:, 1:, None])[..., 0]
        ends = [len(own) - 1 for own in tokens]
        return torch.cat([of_tokens[i, end - n : end] for i, (end, n) in enumerate(zip(ends, lengths, strict=True))])
