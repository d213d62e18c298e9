"""The process that leads: controller, ledger, prompts, rollout, teachers, rewards, checks; the trainer ranks follow
it."""
