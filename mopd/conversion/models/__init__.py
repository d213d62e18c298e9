"""Description of models: how a ``config.json`` reads, which tensors a model has, and how they merge.

What one family has that others have not is a file of ``known``, whose docstring says how to add one.
"""
