"""Text in and out.

vocabulary.py    texts to tokens and back, as the metadata of a file say
stream.py        tokens that come to the host one by one, the likeliest or drawn ones
chat.py          a conversation in a terminal
render.py        the chat template of a file, in a process of its own
"""
