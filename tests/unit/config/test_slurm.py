"""The section ``slurm``: times as sbatch reads them, and what would break the script is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.reading.build import build_from_json
from mopd.config.slurm import SlurmConfig, seconds_of


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:05", 5405), ("2-12", 216_000), ("1-00:30", 88_200), ("1-0:0:7", None)],
)
def test_times_are_sbatchs(time: str, seconds: int | None) -> None:
    """From the page of sbatch: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
    if seconds is None:
        with pytest.raises(ValueError, match="time is '1-0:0:7'"):
            SlurmConfig(time=time)
    else:
        assert SlurmConfig(time=time).time == time and seconds_of(time) == seconds


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"time": "tomorrow"}, "time is 'tomorrow': write minutes, hours:minutes:seconds or days-hours, in quotes"),
        ({"time": "5"}, "stop_before_s is 300 and time '5' is no longer"),
        ({"partition": "a b"}, "partition is 'a b'"),
        ({"account": "x; rm"}, "account is 'x; rm'"),
        ({"setup": ["a\nb"]}, "setup: 'a\\nb' holds a control character, such as a line end"),
        ({"options": ["-C h100"]}, "options names '-C h100': write long options"),
        ({"options": ["--constraint=a\n#SBATCH --uid=0"]}, "holds a control character"),
        ({"options": ["--output=x"]}, "options names --output, which follows from the other keys"),
        ({"options": ["--part=x"]}, "options names --part, which follows as --partition from the other keys"),
        ({"time": "٣٠٠"}, "time is '٣٠٠': write minutes"),
        ({"container": {"type": "apptainer", "image": "--bind=/etc"}}, "would be read as an option: name an image"),
        ({"seeds": [1, 1]}, "seeds names 1 twice"),
        ({"seeds": [1], "form": "heterogeneous"}, "a heterogeneous job cannot be one"),
        ({"spare_nodes": 1, "form": "ray"}, "spare_nodes is set, but form is 'ray', and Ray uses all nodes"),
        ({"components": {"rollout": {}}}, "components is set, but form is 'allocation'"),
        (
            {"container": {"type": "pyxis", "image": "x", "mounts": ["models"]}},
            "mounts names 'models': write SOURCE:TARGET",
        ),
    ],
)
def test_what_would_break_the_script_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        build_from_json(SlurmConfig, keys, "file")
    assert says in str(caught.value)
