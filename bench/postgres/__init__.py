"""The store on PostgreSQL, beside other queues on it."""
