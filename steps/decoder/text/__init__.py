"""Text in and out: the tokens of a vocabulary, answers as they are generated, conversations."""
