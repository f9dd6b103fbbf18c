"""The pool (`Compute`): its nodes, one per host, the scheduler for single calls, and the gangs for broadcasts."""
