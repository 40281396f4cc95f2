"""`palaestra trajectories` and `palaestra episodes`: recorded episodes of UI agents and of plays."""
