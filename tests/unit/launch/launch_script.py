"""The launcher for its tests: ``python launch_script.py NUM_RANKS[,NODES,NODE_RANK,PORT[,HOST]] COMMAND…``; a process
that tests may kill."""

from __future__ import annotations

import sys

from mopd.launch import nodes as module
from mopd.launch.node import Place
from mopd.launch.nodes import NodeLostError, Nodes
from tests.fixtures.networks import enter_network

enter_network()
module.SILENT_S, module.REPORT_S = 12.0, 10.0  # a fraction of a cluster's
words = sys.argv[1].split(",")
num_ranks, *where = map(int, words[:4])
host = {"host": words[4]} if len(words) > 4 else {}
place = Place(num_nodes=where[0], node_rank=where[1], port=where[2], **host) if where else Place()
with Nodes(place) as nodes:
    try:
        nodes.join()
        from mopd.launch.launch import ended_by_others, launch

        ended = launch([sys.executable, *sys.argv[2:]], num_ranks=num_ranks, nodes=nodes)
    except NodeLostError:
        ended = ended_by_others(nodes)
raise SystemExit(ended.code)
