"""Where the replicas of teachers and rollout run: started, watched, restarted and ended here. See ``groups.Groups``."""
