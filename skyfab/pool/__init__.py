"""The pool (`Compute`): its nodes, one per host, the scheduler for solo calls, and the gangs for broadcasts."""
