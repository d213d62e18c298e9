"""Sizes and names that both ends of the wire agree on."""

from __future__ import annotations

MIB = 2**20

CONTENT_TYPE = "application/msgpack"
"""Content type of every message body; errors are small JSON objects."""
DEADLINE_HEADER = "x-mopd-deadline-s"
"""Request header: seconds from arrival after which the client no longer waits for the answer."""
MAX_HEAD_BYTES = MIB
"""Largest packed scalars of one message, in bytes."""
MAX_CHUNK_BYTES = 64 * MIB
"""Largest body with a part of the weights, in bytes, everything included."""
MAX_SAMPLES = 65536
"""Most sequences in one request."""
MIN_TEMPERATURE = 1e-4
"""Smallest positive temperature: logits divided by much less are infinite, and their log-probs are NaN."""
MAX_TEMPERATURE = 1e6
"""Largest temperature: every distribution is uniform long before, and fp32 ends at 3e38."""
