"""Which of the nodes shall serve a job, and a bound on how good any choice can be."""
