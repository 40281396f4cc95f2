"""The typed client of the run service, and how it finds or starts one."""
