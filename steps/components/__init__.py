"""Device code that several steps use. Each component is taught by the step its docstring names."""
