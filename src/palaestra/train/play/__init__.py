"""The worker process of a play, its environments, and the processes in which policies act."""
