"""Commands about a run in its folder, whoever started it."""
