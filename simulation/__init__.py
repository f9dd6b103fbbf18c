"""A pool of many simulated hosts in one process: skyfab's own client code under a simulated clock, without SSH."""
