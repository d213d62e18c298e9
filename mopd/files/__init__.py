"""The one way in and out for small files: read within limits, written whole or not at all, refused in one line."""
