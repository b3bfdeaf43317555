"""A store on an etcd cluster: `etcd://a:2379,b:2379` and `etcds://...`."""
