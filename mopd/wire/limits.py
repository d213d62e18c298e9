"""Sizes and names that both ends of the wire agree on."""

from __future__ import annotations

MIB = 2**20

CONTENT_TYPE = "application/msgpack"
"""Of every message body; errors are small JSON objects."""
DEADLINE_HEADER = "x-mopd-deadline-s"
"""Request header: seconds from arrival after which nobody waits for the answer."""
MAX_HEAD_BYTES = MIB
"""Scalars of one message, packed."""
MAX_CHUNK_BYTES = 64 * MIB
"""One body of a weight push, everything included."""
MAX_CHUNK_PIECES = 2048
"""Tensors, or parts of tensors, in one chunk."""
MAX_NAME_BYTES = 256
"""UTF-8 bytes of a weight's name."""
MAX_SAMPLES = 65536
"""Sequences in one request."""
MIN_TEMPERATURE = 1e-4
"""Smallest positive temperature: logits divided by much less are infinite, and their log-probs no numbers."""
MAX_TEMPERATURE = 1e6
"""Largest temperature: every distribution is uniform long before, and fp32 ends at 3e38."""
