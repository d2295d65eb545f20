"""Search algorithms for the nodes of a job, and lower bounds on the time of any choice."""
