"""Hugging Face folders and Megatron-Core checkpoints: reading, checking, writing and converting them.

``models/``      what each family is: its config, its tensors, how they merge (to add one: ``models/__init__.py``)
``hf/``          Hugging Face folders: tensors, names, side files, hashes; the only caller of transformers' loaders
``torch_dist/``  Megatron's distributed format, without Megatron
``jobs/``        what ``mopd convert`` does, as descriptions of files to write
``job.py``       execution of such a job: files by any number of ranks, resumable, whole or absent
``mapped.py``    tensors that are views of a file
"""
