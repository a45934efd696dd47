"""The parts of a worker: what a handler holds, how it shows that it lives, how it asks again."""
