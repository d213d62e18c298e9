"""An HTTP server around one engine: scoring, sampling, weight updates."""
