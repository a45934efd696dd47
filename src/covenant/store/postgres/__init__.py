"""The engine on PostgreSQL: any number of daemons on one database."""
