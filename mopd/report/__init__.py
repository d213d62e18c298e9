"""What people watch: sinks of numbers while a run goes on, and the report of a run folder."""
