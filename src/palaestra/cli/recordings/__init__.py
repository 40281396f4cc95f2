"""`palaestra trajectories`, `demos` and `episodes`: recorded episodes of UI agents, oracles and plays."""
