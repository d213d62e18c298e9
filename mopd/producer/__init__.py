"""The process beside rank 0 that makes samples: rollout, teachers, rewards, their routers, and the data plane."""
