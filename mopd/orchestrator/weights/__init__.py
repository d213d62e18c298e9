"""The student's weights on their way to the rollout: when, to whom, by which way, and again to those without them."""
