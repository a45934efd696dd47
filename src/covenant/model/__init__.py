"""What exists: records, envelopes, events, commands, and the errors with their codes."""
