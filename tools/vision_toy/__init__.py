"""Parts of ``tools.make_vision_toy``: images of two glyphs, the two tasks, the tokenizer, training of the models."""
