"""Ingestion of telemetry: from the files a trainer writes to journals, series and followers.

Palaestra's own trainer writes a journal. For other trainers, `translator` converts output and event files into the same
journal, so that everything downstream is independent of the trainer. `pump.Pump` drives ingestion. Only `series`
imports NumPy.
"""
