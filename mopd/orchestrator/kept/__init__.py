"""What a run keeps on disk to use again: teachers' scores, and samples."""
