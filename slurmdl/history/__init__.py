"""Past and simulated jobs: audit of accounting records, and replay of job traces on a simulated cluster."""
