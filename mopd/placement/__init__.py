"""Replicas of teachers and rollout: started, watched, restarted and ended (``groups.Groups``)."""
