"""From a recipe to a job in the queue, or to one line that says why not."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mopd.base.files.writing import write_text, writing
from mopd.base.types import UserError
from mopd.config.load import Loaded, dump
from mopd.config.reading.tree import STANDARD_INPUT
from mopd.conversion.models.dims import check_layout
from mopd.conversion.models.reading import read_dims
from mopd.conversion.models.stages import stages_of
from mopd.launch.slurm.job import keep_id, kept_id, state_of, submit
from mopd.launch.slurm.layout import lay_out, slurm_of
from mopd.launch.slurm.script import render_script
from mopd.run.folder import RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedJob:
    """What would be submitted."""

    loaded: Loaded
    folder: Path
    """The run's ``job`` folder."""
    text: str
    """The script."""

    @property
    def script(self) -> Path:
        return self.folder / "job.sh"

    @property
    def recipe(self) -> Path:
        """The recipe as it is now: the job, queued again hours later, reads no other."""
        return self.folder / "recipe.yaml"

    @property
    def id_file(self) -> Path:
        return self.folder / "job.json"

    @property
    def runs(self) -> list[Path]:
        """Folders of the runs: one, or one for each seed."""
        seeds = slurm_of(self.loaded).seeds
        return [self.folder.parent / f"seed_{seed}" for seed in seeds] or [self.folder.parent]


def prepare_job(loaded: Loaded) -> PreparedJob:
    """Lay the job out and write its script, in memory.

    Raises:
        UserError: what cannot be, by key.
    """
    if loaded.path == STANDARD_INPUT:
        raise UserError("recipe: standard input is gone when a job is queued again: write it to a file and name that")
    layout = lay_out(loaded)
    _check_student(loaded)
    folder = RunDir(loaded.recipe.run_dir).path / "job"
    job = PreparedJob(loaded=loaded, folder=folder, text="")
    text = render_script(loaded, layout, run=folder.parent, recipe=job.recipe, script=job.script)
    return PreparedJob(loaded=loaded, folder=folder, text=text)


def submit_job(job: PreparedJob) -> str:
    """Write the script into the run's folder, submit it, and return the job's id.

    Raises:
        UserError: a job of this run is in the queue, the folder cannot be written, or sbatch refuses; a folder that was
            made for this is removed.
    """
    before = kept_id(job.id_file)
    if before is not None:
        state = state_of(before)
        if state is not None and not state.has_ended:
            raise UserError(
                f"{job.loaded.where('run_dir')}: {state} is this run's: stop it (mopd stop {job.folder.parent}, or "
                f"scancel {before}), or set another run_dir"
            )
    logs = job.folder.parent / "logs" / "job"
    made = [path for path in (logs, *logs.parents, job.folder) if not path.exists()]
    written = [path for path in (job.script, job.recipe) if not path.exists()]
    try:
        with writing(job.folder):
            logs.mkdir(parents=True, exist_ok=True)
            job.folder.mkdir(exist_ok=True)
        write_text(job.recipe, dump(job.loaded))
        write_text(job.script, job.text)
        job.script.chmod(0o755)
        job_id = submit(job.script, where=job.loaded.where("slurm"))
    except UserError:
        for path in written:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # what somebody has put there meanwhile
            for path in sorted(made, key=lambda path: len(path.parts), reverse=True):
                path.rmdir()
        raise
    keep_id(job.id_file, job_id, slurm_of(job.loaded).form)
    return job_id


def _check_student(loaded: Loaded) -> None:
    """The layout divides the model, where its folder is here."""
    parallel, folder = loaded.recipe.student.parallel, Path(loaded.recipe.student.model)
    if not (folder / "config.json").is_file():
        return
    try:
        check_layout(
            read_dims(folder),
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            stages=stages_of(parallel),
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        )
    except UserError as error:
        raise UserError(f"{loaded.path}: {error}") from error
