"""skyfab beside what users would take instead, job by job, in one run on the same lab hosts: ``./inv bench --peers``.

`jobs` lists what is measured, `contestants` who takes part in what. Each contestant is a program: a module
``by_NAME`` that runs with the interpreter of the peers' own environment (`environment`), never in this process.
A job is either a whole program, timed from its start to its end, or one of several figures of a session, which
connects first and then waits for orders (`session`). `contest` starts the programs in turns, and ends all that they
leave. The modules ``by_NAME``, `site`, `session`, `work` and `gang` import nothing of skyfab, except `by_skyfab`.
"""
