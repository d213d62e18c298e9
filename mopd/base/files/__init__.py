"""Reading and writing of small files: read within limits, written whole or not at all, errors in one line."""
