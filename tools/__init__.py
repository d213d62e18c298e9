"""Programs for developers and newcomers; nothing in ``mopd`` imports them."""
