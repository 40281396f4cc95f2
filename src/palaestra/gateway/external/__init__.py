"""Sessions on session servers that were started elsewhere, and the journal of leases with which they are adopted."""
