"""The launcher for its tests: ``python launch_script.py WORLD_SIZE COMMAND…``; a process that tests may kill."""

from __future__ import annotations

import sys

from mopd.launch.launch import launch
from mopd.launch.node import Place
from mopd.launch.nodes import Nodes

raise SystemExit(launch([sys.executable, *sys.argv[2:]], num_ranks=int(sys.argv[1]), nodes=Nodes(Place())).code)
