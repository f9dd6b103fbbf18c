"""The programs that run on a host: link → agent → workers.

sshd starts a `link`, which passes its stdin and stdout to the `agent` and sleeps. The agent is one event loop that
survives the loss of connections. It relays calls to `worker` processes, which a `zygote` forks. Only the standard
library, cloudpickle and `skyfab.protocol` are used: nothing here imports the client's side.
"""
