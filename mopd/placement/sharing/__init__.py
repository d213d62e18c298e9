"""Student and rollout on the same GPUs, by turns."""
