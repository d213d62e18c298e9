"""Hugging Face folders and Megatron-Core checkpoints: read, checked, written, turned into one another.

``models/``      what a family is: its config, its tensors, how they merge (to add one: ``models/__init__.py``)
``hf/``          Hugging Face folders: tensors, names, side files, hashes; the one door to transformers' loaders
``torch_dist/``  Megatron's distributed format, without Megatron
``jobs/``        what ``mopd convert`` does, as descriptions of files to write
``job.py``       one such job: files by any number of ranks, resumable, whole or absent
``mapped.py``    tensors that are views of a file
"""
