"""Files of Palaestra: atomic writing, run ids, the run directory, and the checkpoint format. Imports no torch."""
