"""Host memory as a place for a student's optimizer states: permanently, or while the rollout uses the GPU."""
