"""Whether a step is right: which works are asked for, their check shapes, and the verdict on each."""
