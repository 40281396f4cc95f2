"""What is known about one run: its event log, facts about its processes, progress, alarms."""
