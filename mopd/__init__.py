"""mopd: multi-teacher on-policy distillation on Megatron-Core."""

__version__ = "0.2.0"
