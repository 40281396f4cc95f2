"""From what a trainer writes to what people read: journals, archives, series, rings.

Ours writes its journal itself; for any other trainer `translator` turns output and event files into the same journal.
From there on nobody knows which trainer it was. `pump.Pump` drives it all; `series` alone imports numpy.
"""
