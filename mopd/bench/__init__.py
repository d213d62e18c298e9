"""The losses beside plain PyTorch, published styles and released packages. Entry: ``mopd bench losses``."""
