"""The coordinator of replicas that are processes of their own."""
