"""The other end of the wire: a mailbox that lives in a daemon."""
