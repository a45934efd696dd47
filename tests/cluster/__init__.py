"""Three daemons on one database, and everything that can happen to them: what their clients saw is checked."""
