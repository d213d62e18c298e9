"""``python -m mopd`` and ``torchrun … -m mopd`` enter here."""

from mopd.cli.main import main

# The guard is needed: saving a checkpoint spawns a multiprocessing manager that imports this module again.
if __name__ == "__main__":
    raise SystemExit(main())
