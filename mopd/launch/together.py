"""A replica on several nodes: one process on each, which start and end together.

::

    node 0    engine, its workers there, HTTP ──┐  Nodes: who is there, who has ended, and why
    others    workers ──────────────────────────┘  vLLM's own queues and groups: work

vLLM's processes do not notice that another node's are gone: its workers would hold their GPUs for ever, and its engine
would wait for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import psutil

from mopd.base.types import UserError
from mopd.launch.launch import ended_by_others
from mopd.launch.node import Place
from mopd.launch.nodes import POLL_S, NodeLostError, Nodes
from mopd.launch.preparing import shown
from mopd.launch.signals import first_sigterm_asks
from mopd.weights.addresses import address_towards

if TYPE_CHECKING:
    from mopd.engines.interface import EngineNode

STOP = "stop"


def together(
    place: Place, facts: Mapping[str, Any], work: Callable[[EngineNode], int], leave: Callable[[], None] = lambda: None
) -> int:
    """Meet the other nodes, do this one's ``work``, and return its exit code. This process ends when another does.

    SIGTERM to any node lets node 0 end its requests first.

    Args:
        facts: what all nodes must agree on, by name.
        leave: is called before this process ends because of another.

    Raises:
        UserError: a node does not come, or has other ``facts``; what ``work`` raises.
    """
    over = threading.Event()
    with Nodes(place) as nodes:
        try:
            nodes.join()
            node = _agree(nodes, facts)
            if not place.is_first:
                first_sigterm_asks(lambda: nodes.tell(STOP))
            threading.Thread(target=_watch, args=(nodes, over, leave), name="replica", daemon=True).start()
            code = work(node)
        except NodeLostError:
            return _ended(nodes)
        finally:
            over.set()
        nodes.report("ended" if code == 0 else "died", "its engine has died" if code else "", code=code)
    return code


def _agree(nodes: Nodes, facts: Mapping[str, Any]) -> EngineNode:
    """Compare with node 0, and return this node's part of the engine."""
    from mopd.engines.interface import EngineNode  # heavy

    place, own = nodes.place, json.loads(json.dumps(facts))
    address = address_towards(place.host, place.port)
    first = json.loads(nodes.once_per_node(lambda: json.dumps([own, address, _free_port(address)]), str))
    there, master_addr, master_port = first
    for name in sorted({*own, *there} - {"replica"}):
        if own.get(name) != there.get(name):
            raise UserError(
                f"{name} is {shown(own.get(name))} on node {place.node_rank} and {shown(there.get(name))} on node 0: "
                "start every node of a replica with one recipe, one model and the same overrides"
            )
    return EngineNode(
        num_nodes=place.num_nodes,
        node_rank=place.node_rank,
        address=address,
        master_addr=master_addr,
        master_port=master_port,
    )


def _free_port(address: str) -> int:
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        return int(listener.getsockname()[1])


def _watch(nodes: Nodes, over: threading.Event, leave: Callable[[], None]) -> None:
    """End this process, whatever it waits for, when another node has ended."""
    is_asked = False
    try:
        while not over.wait(POLL_S):
            nodes.check()
            if nodes.place.is_first and not is_asked and nodes.was_told(STOP):
                is_asked = True
                os.kill(os.getpid(), signal.SIGTERM)
    except NodeLostError:
        code = _ended(nodes)
    except UserError as error:
        print(f"mopd: error: {error}", file=sys.stderr)
        code = error.exit_code
    else:
        return
    leave()
    kill_children()
    nodes.__exit__(None, None, None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def kill_children() -> None:
    """Kill everything below this process, whichever of it ends meanwhile."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _ended(nodes: Nodes) -> int:
    """Return the exit code of a node that ends with another one: 0 with one that has ended in order."""
    return 0 if nodes.cause().kind == "ended" else ended_by_others(nodes).code
