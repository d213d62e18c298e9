"""``python -m mopd.bench.losses``: the command where only torch is installed (a bare GPU machine)."""

from mopd.bench.losses.command import main

raise SystemExit(main())
