"""What happened, for people and programs: the timeline, the steps, the status."""
