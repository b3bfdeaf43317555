"""The coordinator's log, its lease and its address in an etcd cluster.

With an address such as `etcd://a:2379,b:2379,c:2379` a run has no single point of
failure: of several coordinators one has the lease, and the others wait for it.
"""
