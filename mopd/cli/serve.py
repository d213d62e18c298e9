"""``mopd serve``: one engine behind one HTTP server, in this process, until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd.base.files.reading import shown_path
from mopd.base.hardware import node_name
from mopd.base.types import UserError
from mopd.cli.ranks import add_recipe
from mopd.config.groups import EngineGroupConfig
from mopd.config.load import Loaded, load_recipe
from mopd.config.placements import RegisteredConfig
from mopd.config.reading.tree import dotted
from mopd.launch.checks.inputs import check_model_folder
from mopd.launch.failure import close_standard_input
from mopd.launch.node import Place, add_node_arguments, node_of_step, place_of
from mopd.launch.preparing import prepare
from mopd.launch.together import together
from mopd.placement.engine_file import EngineFile, is_engine_file, read_engine_file, rollout_file, teacher_file
from mopd.placement.process import become_server, check_interpreter
from mopd.report.run_files import RunFiles
from mopd.serving.address import Address, is_any_address
from mopd.serving.registration import Registrar

if TYPE_CHECKING:
    from mopd.engines.interface import EngineNode
    from mopd.serving.host import EngineHost

ABOUT = "one engine of a recipe behind HTTP"
EXAMPLES = """\
examples:
  mopd serve my.yaml --teacher math --port 8000
  mopd serve my.yaml --teacher large --nnodes 2 --node-rank 1 --rdzv-endpoint 10.0.0.1:29500   the second half of one
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add_recipe(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--teacher", metavar="NAME", help="serve this teacher's scores")
    which.add_argument("--rollout", action="store_true", help="serve the student's sampler")
    parser.add_argument(
        "--replica", type=int, default=0, metavar="N", help="number of this replica, for the logs (default: 0)"
    )
    more = "a LoRA adapter beside the teacher's model, under the name of the teacher that asks for it; may be repeated"
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH", help=more)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 (default) takes a free one")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="secret that clients must send")
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help="written when the server answers: url and pid")
    register = "the folder replicas of a run, which takes the server in; it makes its own secret"
    parser.add_argument("--register", type=Path, metavar="FOLDER", help=register)
    add_node_arguments(parser)


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Serve an engine file, or an engine of a recipe; the exit code. A taken port is told before anything is loaded."""
    is_file = is_engine_file(args.recipe)
    loaded = None if is_file else load_recipe(args.recipe, args.set)
    if is_file == (args.teacher is not None or args.rollout):
        cure = "leave --teacher and --rollout out" if is_file else "name --teacher NAME or --rollout"
        raise UserError(f"serve {args.recipe}: a recipe has several engines, an engine file has one: {cure}")
    if loaded is None:
        file, where = read_engine_file(args.recipe), f"{args.recipe}: model"
    else:
        key = ("student", "model") if args.rollout else ("teachers", args.teacher, "model")
        loaded = prepare(loaded, only=dotted(key))
        make = rollout_file if args.rollout else partial(teacher_file, name=args.teacher)
        file, where = make(loaded.recipe, replica=args.replica), loaded.where(*key)
        if args.register is not None:
            _require_registered(loaded, *_group(loaded, args))
    file = _with_adapters(file, args.adapter)
    address = Address(host=args.host, port=args.port, token_file=args.token_file, ready_file=args.ready_file)
    step = node_of_step()
    if step is not None and args.nnodes == step[0] and "--node-rank" not in arguments:
        args.node_rank = step[1]
    place = place_of(args)
    if loaded is not None:
        _go_over(loaded, *_group(loaded, args), file, address, args.register, place)
    check_model_folder(file.model, where)
    if not place.is_first:
        return together(place, _facts(file), partial(_hold_workers, file))
    registrar = None if args.register is None else _registrar(args, file)
    token = address.read_token() if registrar is None else registrar.token
    with address.listen() as listener:
        if registrar is not None and is_any_address(listener):
            raise UserError(f"--host {args.host} is no address that a run could call: name this machine's own")
        serve = partial(_serve, file, address, listener, token, registrar)
        leave = (lambda: None) if registrar is None else registrar.end
        return together(place, _facts(file), serve, leave) if place.num_nodes > 1 else serve(None)


def _with_adapters(file: EngineFile, texts: Sequence[str]) -> EngineFile:
    """Return the file with the adapters of ``--adapter``."""
    adapters = dict(file.adapters)
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise UserError(f"--adapter {text}: write NAME=PATH, a teacher's name and its adapter's folder")
        if file.role != "teacher":
            raise UserError(f"--adapter {text}: {file.name} has the student's weights: leave it out")
        adapters[name] = os.path.abspath(path)
    return replace(file, adapters=adapters)


def _group(loaded: Loaded, args: argparse.Namespace) -> tuple[Sequence[str], EngineGroupConfig]:
    """Return the served group's key and section."""
    recipe = loaded.recipe
    return (
        (("rollout",), recipe.rollout) if args.rollout else (("teachers", args.teacher), recipe.teachers[args.teacher])
    )


def _go_over(
    loaded: Loaded,
    key: Sequence[str],
    group: EngineGroupConfig,
    file: EngineFile,
    address: Address,
    register: Path | None,
    place: Place,
) -> None:
    """Go over to the interpreter that a registered group names."""
    placement = group.placement
    if not isinstance(placement, RegisteredConfig) or placement.python is None:
        return
    check_interpreter(placement.python, loaded.where(*key, "placement", "python"))
    files = {"--token-file": address.token_file, "--ready-file": address.ready_file, "--register": register}
    options = [f"{name}={path}" for name, path in files.items() if path is not None]
    options += [f"--host={address.host}", f"--port={address.port}"]
    if place.num_nodes > 1:
        endpoint = f"[{place.host}]:{place.port}" if ":" in place.host else f"{place.host}:{place.port}"
        options += [f"--nnodes={place.num_nodes}", f"--node-rank={place.node_rank}", f"--rdzv-endpoint={endpoint}"]
    become_server(placement.python, json.dumps(file.to_json()), options)


def _require_registered(loaded: Loaded, key: Sequence[str], group: EngineGroupConfig) -> None:
    """The recipe's run looks for servers of this group."""
    placement = group.placement
    if not isinstance(placement, RegisteredConfig):
        raise UserError(
            f"{loaded.where(*key, 'placement')}: is of type {placement.type}, whose run takes in no server that "
            "registers: set placement: {type: registered}, or leave --register out"
        )


def _registrar(args: argparse.Namespace, file: EngineFile) -> Registrar:
    """Return the registrar that tells the run of this server."""
    if args.token_file is not None:
        raise UserError("--token-file with --register: the server makes a secret of its own: leave --token-file out")
    if args.register.name != RunFiles(Path()).replicas.name:
        raise UserError(f"--register {shown_path(args.register)}: name the folder replicas of a run, RUN/replicas")
    key = "rollout" if file.role == "rollout" else f"teachers.{file.name}"
    return Registrar(args.register, key, host=node_name())


def _facts(file: EngineFile) -> dict[str, Any]:
    """Return what all nodes of a replica must agree on, by the name that a person knows."""
    from mopd.run.manifests import glimpse

    return {**asdict(file), **{f"{file.model}: {name}": text for name, text in glimpse(Path(file.model)).items()}}


def _log_to_terminal(file: EngineFile) -> None:
    logging.basicConfig(level=logging.WARNING, format=f"{file.label}: %(message)s", force=True)
    logging.getLogger("mopd").setLevel(logging.INFO)
    close_standard_input()


def _hold_workers(file: EngineFile, node: EngineNode) -> int:
    """Hold the workers of a node that is not its replica's first: they end with an error, or this process does."""
    from mopd.placement.engine_loading import start_host

    _log_to_terminal(file)
    asyncio.run(start_host(file, node))
    return 0


def _serve(
    file: EngineFile,
    address: Address,
    listener: socket.socket,
    token: str | None,
    registrar: Registrar | None,
    node: EngineNode | None,
) -> int:
    """Load the engine, serve on ``listener`` until SIGTERM or until the engine is dead; the exit code.

    Raises:
        UserError: the model cannot be loaded, or the ready file not be written.
    """
    from mopd.conversion.adapters import read_adapter
    from mopd.conversion.hf.manifest import HASHES, make_manifest
    from mopd.placement.engine_loading import server_limits, start_host
    from mopd.run.manifests import hash_cache
    from mopd.serving.app import Served
    from mopd.serving.host import ThreadHost
    from mopd.serving.request_checks import LOOPBACK_NAMES
    from mopd.serving.server import serve

    _log_to_terminal(file)
    manifest = asdict(make_manifest(Path(file.model), cache_file=hash_cache()))
    adapters = {name: read_adapter(path, file.model).sha256 for name, path in file.adapters.items()}

    async def work() -> tuple[int, EngineHost]:
        host = await start_host(file, node)
        served = Served(
            role=file.role,
            name=file.name,
            host=host,
            limits=server_limits(file),
            manifest={name: manifest[name] for name in HASHES},
            adapters=adapters,
            token=token,
            names=(*LOOPBACK_NAMES, address.host),
        )
        return await serve(served, address, listener, registrar), host

    code, host = asyncio.run(work())
    if isinstance(host, ThreadHost) and host.is_computing:  # the interpreter would wait for the thread
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
