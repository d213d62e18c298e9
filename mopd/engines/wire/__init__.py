"""The protocol between mopd's servers and clients: messages, their bytes, their limits."""
