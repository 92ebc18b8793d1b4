"""What people would use instead of tm_slurm, each tuned as well as we could, measured in one way.

`rival` says what a rival has to be able to do; there is one file for each. `trial` puts one fault into one of
them, `downtime` works out from its step log what that has cost, `summary` makes ratios and a table of it.
What runs on the nodes is in the files that are named for a rank, a replica or a standby.
"""
