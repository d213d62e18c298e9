"""``ranks.py`` with the stand-in of TransformerEngine: students are built as on a GPU."""

from __future__ import annotations

import sys

from tests.fixtures.engine_stand_in import install

install(as_on_cuda=True)

from tests.parity.student.ranks import main  # noqa: E402

if __name__ == "__main__":
    main(sys.argv[1])
