"""Everything that runs on a host: link → agent → ranks.

`link` is what sshd starts; it gives its ends of the connection to the `agent` and sleeps. The agent is one
loop that outlives connections. It relays calls to `rank` processes, which a `zygote` forks. Standard library,
cloudpickle and `skyfab.protocol` only: nothing here imports the client's side.
"""
