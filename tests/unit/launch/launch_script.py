"""The launcher for its tests: ``python launch_script.py NUM_RANKS[,NODES,NODE_RANK,PORT[,HOST]] COMMAND…``; a process
that tests may kill.

``MOPD_TESTS_PATIENCE_S``: how long its ranks may take to end; ``MOPD_TESTS_IGNORES``: a signal that it was started to
ignore."""

from __future__ import annotations

import os
import signal
import sys

from mopd.launch import nodes as module
from mopd.launch.node import Place
from mopd.launch.nodes import NodeLostError, Nodes
from tests.fixtures.networks import enter_network

enter_network()
module.SILENT_S, module.REPORT_S = 12.0, 10.0  # a fraction of a cluster's
if "MOPD_TESTS_PATIENCE_S" in os.environ:
    module.TERMINATE_TIMEOUT_S = float(os.environ["MOPD_TESTS_PATIENCE_S"])  # type: ignore[attr-defined]
if "MOPD_TESTS_IGNORES" in os.environ:
    signal.signal(signal.Signals[os.environ["MOPD_TESTS_IGNORES"]], signal.SIG_IGN)
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
