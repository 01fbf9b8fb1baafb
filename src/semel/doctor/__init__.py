"""The doctor: what is wrong with the transactions of a cluster, how sure that is, and the command that cures it.

`snapshot` reads the state of a cluster through the admin client, with few requests; `checks` are pure functions from a
snapshot to findings; `findings` has the table of names. `examine` does all of it, over any driver of the client.
"""
