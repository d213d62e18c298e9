"""Parts of ``tools.make_quickstart``: the sequence tasks, the tokenizer, training of the tiny models, the cache."""
