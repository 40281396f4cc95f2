"""Short clips of agents at work: encoded in a process of their own, kept with their run, and what they cost."""
