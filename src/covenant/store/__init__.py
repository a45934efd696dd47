"""Where it is kept: one small contract, and the engines that keep it."""
