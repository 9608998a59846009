"""What a learner runs: the museum of known bugs, and exercises with their check."""
