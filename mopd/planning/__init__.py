"""What a run will take before it is started: who is on which GPU, memory part by part, bytes on each link, seconds of
each stage. Numbers from ``config.json`` and the recipe alone; no torch in this room."""
