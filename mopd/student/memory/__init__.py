"""What of a student's optimizer lives outside its device: always, or while the rollout has it."""
