"""Graders of a response, run in the processes of ``judge.py``; they import nothing of mopd but their own room."""
