"""The launcher for its tests: ``python launch_script.py NUM_RANKS[,NODES,NODE_RANK,PORT] COMMAND…``; a process that
tests may kill."""

from __future__ import annotations

import sys

from mopd.launch import nodes as module
from mopd.launch.node import Place
from mopd.launch.nodes import NodeLostError, Nodes

module.SILENT_S, module.REPORT_S = 12.0, 10.0  # a fraction of a cluster's
num_ranks, *where = map(int, sys.argv[1].split(","))
place = Place(num_nodes=where[0], node_rank=where[1], port=where[2]) if where else Place()
with Nodes(place) as nodes:
    try:
        nodes.join()
        from mopd.launch.launch import ended_by_others, launch

        ended = launch([sys.executable, *sys.argv[2:]], num_ranks=num_ranks, nodes=nodes)
    except NodeLostError:
        ended = ended_by_others(nodes)
raise SystemExit(ended.code)
