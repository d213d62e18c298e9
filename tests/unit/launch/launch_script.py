"""The launcher for its tests: ``python launch_script.py WORLD_SIZE COMMAND…``; a process that tests may kill."""

from __future__ import annotations

import sys

from mopd.launch.launch import launch

raise SystemExit(launch([sys.executable, *sys.argv[2:]], world_size=int(sys.argv[1])))
