"""Which nodes can serve a job, and the arrays over them."""
