"""The contract, point by point, on every engine. Each test names in its docstring the point that it holds."""
