"""What only the journal has: files, crashes, failing disks, and a chain that can be checked."""
