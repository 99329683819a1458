"""Which plan a job should have: what a plan costs per step and in memory, learned from what runs showed."""
