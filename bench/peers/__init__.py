"""The peers that the mailbox is measured beside."""
