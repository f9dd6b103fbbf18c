"""Everything that runs on a host: agent and workers, the questions that hosts answer, the worker of a device."""
