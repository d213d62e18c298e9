"""What judges a response, in the processes of ``judge.py``; nothing here imports more of mopd than its own room."""
