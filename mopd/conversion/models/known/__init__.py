"""The supported model families: one file per family (or per kin that share most of it), found by its being here.

To add a family whose layers are like another's, write a file: ``FAMILIES`` maps each ``model_type`` to its ``Family``,
with the rows of its name table (``rows.py``) and readers of what its ``config.json`` says beyond the common keys; what
Megatron-Core cannot express is refused there, by key. Add its tiny model to ``tests/fixtures/tiny_models.py``: tests of
conversion and layouts then take it up.

Only a property that no family had costs more: a field of ``dims.py``, and in ``student/model`` where it becomes one of
Megatron's configuration or another layer; a new way to merge tensors is a ``Merge`` of ``mapping.py``. A vision tower's
keys are ``vision_config.py``'s, its tensors ``towers.py``'s.
"""

from importlib import import_module
from pkgutil import iter_modules

from mopd.conversion.models.family import Family

FAMILIES: dict[str, Family] = {
    model_type: family
    for module in iter_modules(__path__)
    for model_type, family in import_module(f"{__name__}.{module.name}").FAMILIES.items()
}
"""``model_type`` -> its family. Names are spelled without ``language_model``; towers are in ``towers.py``."""
