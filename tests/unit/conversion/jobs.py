"""Running conversion jobs in tests."""

from __future__ import annotations

from pathlib import Path

from mopd.conversion.job import Job


def run_job(job: Job, *, ranks: int = 1, resume: bool = False) -> None:
    """One job from begin to end, its ranks one after another in this process."""
    assert job.begin(resume=resume)
    for rank in range(ranks):
        job.write_share(rank, ranks)
    job.complete()


def all_bytes(folder: Path) -> dict[str, bytes]:
    """Content of every file below a folder by relative name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
