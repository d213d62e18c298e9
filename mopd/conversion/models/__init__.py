"""Description of each model family: how its ``config.json`` reads, which tensors it has, and how they merge.

To add a family:

1. ``reading.py``: a row of ``_FORMATS`` (and a reader of its experts), which turns ``config.json`` into ``ModelDims``;
   what Megatron-Core cannot express is refused there, by key. A new property of a model is a field in ``dims.py``.
   Keys of a vision tower are ``vision_config.py``'s, its tensors ``towers.py``'s.
2. ``families.py``: a row of ``FAMILIES``, the names and shapes of its tensors on both sides. A tensor that merges in a
   new way is a new ``Merge`` in ``mapping.py``.
3. ``student/model/config.py`` and ``student/model/gpt.py``: where such a property becomes a field of Megatron's
   configuration or another layer.

Then add it to the cases of ``tests/parity/conversion`` (logits as transformers', every bit back) and to the table in
``docs/conversion.md``. No other file knows families.
"""
