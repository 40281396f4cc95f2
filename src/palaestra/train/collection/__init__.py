"""Collection of datasets: the policies whose behaviour is recorded, and the loop that records it."""
