"""Commands about a run in its folder, however it was started."""
