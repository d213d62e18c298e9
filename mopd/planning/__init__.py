"""Plan of a run before it is started: who is on which GPU, memory part by part, bytes on each link, seconds of each
stage."""
