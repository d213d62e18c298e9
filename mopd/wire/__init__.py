"""What mopd's servers and clients say to one another: messages, their bytes, their limits."""
