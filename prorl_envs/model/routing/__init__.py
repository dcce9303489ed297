"""Load balancing, session affinity and pausing over several model servers."""
