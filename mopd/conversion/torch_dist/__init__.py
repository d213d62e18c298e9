"""Megatron-Core's distributed checkpoints (``torch_dist``), read and written without Megatron.

Megatron's ``dist_checkpointing`` saves and loads the state of a model, so that one must be built first, and a model of
the checkpoint's size is in memory. A conversion needs neither: every tensor has its own bytes in a known place. Here
one tensor, or one layer's part of a stacked one, is mapped, cut and written at a time. Peak memory above the process,
beside the same conversion through a ``GPTModel`` (one process, bf16, four layers with 64 experts, 3.8 GB):

                                  streamed      with a model
    Hugging Face -> Megatron      0.66 GB       4.5 GB          1 : 6.9
    Megatron -> Hugging Face      0.66 GB       5.6 GB          1 : 8.4

The first is the largest tensor (the embedding, 0.62 GB) whatever the size of the model; the second grows with it (at
1.9 GB: 1 : 4.0 and 1 : 4.5). Both wait for the disk: their times are the same within noise. To measure again:

    python tools/measure_conversion.py --folder /data/measure --gigabytes 3.5 --steps make to-megatron to-hf \\
        model-to-megatron model-to-hf

The second reason: Megatron unpickles what it finds. ``description.py`` and ``pickled.py`` read the same files as inert
values, and ``student/checkpoints/restricted.py`` puts them into Megatron's own loader, with which a run resumes.

``plan.py``         where a parameter lies, and how a checkpoint is cut into files for a layout
``reader.py``       boxes of tensors out of a folder        ``writer.py``  a folder out of boxes
``description.py``  ``.metadata``, the pickle of the format  ``pickled.py``  archives of ``torch.save``
"""
